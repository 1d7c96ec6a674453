#include "packed_matrix.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "ggml_blocks.h"
#include "packed_block.h"
#include "packed_formats.h"

namespace triptych {
namespace {

size_t panel_bytes_of(WeightFormat format, int columns) {
  const FormatShape shape = shape_of(format);
  if (shape.code_bits > 8)
    return static_cast<size_t>(columns) * kPanelRows * static_cast<size_t>(shape.code_bits / 8);
  const int blocks = columns / kBlockColumns;
  return block_offset(shape, blocks) - (shape.super ? static_cast<size_t>(shape.head_bytes) : 0);
}

void check_shape(WeightFormat format, int rows, int columns) {
  const int block = ggml_block(format).columns;
  if (rows < 1 || columns < 1 || columns % block != 0)
    throw std::invalid_argument(
        "a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) + " of GGML type " +
        std::to_string(static_cast<int>(format)) +
        " cannot be packed: rows and columns must be positive, columns a multiple of " +
        std::to_string(block));
}

// Adds the codes of one row to a block whose codes are zero.
void store_codes(const FormatShape& shape, const uint8_t* codes, int row, uint8_t* out) {
  for (int column = 0; column < kBlockColumns; ++column) {
    const int pair = column / 2, lane = 2 * row + column % 2;
    if (shape.code_bits == 8) {
      out[pair * 32 + lane] = codes[column];
      continue;
    }
    uint8_t* word = out + (pair / 4 * 32 + lane) * 2;
    word[pair % 4 / 2] |= static_cast<uint8_t>((codes[column] & 15) << 4 * (pair % 2));
    if (shape.code_bits == 5)
      out[256 + lane * 2 + pair / 8] |= static_cast<uint8_t>(codes[column] >> 4 << pair % 8);
  }
}

void pack_row(const PackedMatrix& matrix, const uint8_t* source, int row, uint8_t* panel) {
  const FormatShape shape = shape_of(matrix.format);
  const GgmlBlock ggml = ggml_block(matrix.format);
  const auto at = [row](uint8_t* base, int bytes) { return base + row * bytes; };
  for (int block = 0; block < matrix.columns / kBlockColumns; ++block) {
    const uint8_t* from = source + block * kBlockColumns / ggml.columns * ggml.bytes;
    const GgmlCodes values = read_ggml_codes(matrix.format, from, block % kSuperBlocks);
    uint8_t* scales = panel + block_offset(shape, block);
    if (shape.super) {
      uint8_t* head = panel + head_offset(shape, block);
      std::memcpy(at(head, 2), &values.d, 2);
      if (shape.mins) std::memcpy(at(head + 2 * kPanelRows, 2), &values.m, 2);
      *at(scales, 1) = values.scales[0];
      if (shape.halves == 2) *at(scales + kPanelRows, 1) = values.scales[1];
      if (shape.mins) *at(scales + kPanelRows, 1) = values.min;
    } else {
      std::memcpy(at(scales, 2), &values.d, 2);
      if (shape.mins) std::memcpy(at(scales + 2 * kPanelRows, 2), &values.m, 2);
    }
    store_codes(shape, values.codes, row, scales + shape.scale_bytes);
  }
}

void pack_float_row(const PackedMatrix& matrix, const uint8_t* source, int row, uint8_t* panel) {
  const size_t bytes = static_cast<size_t>(shape_of(matrix.format).code_bits / 8);
  uint8_t* out = panel + static_cast<size_t>(row) * bytes;
  for (int column = 0; column < matrix.columns; ++column, out += kPanelRows * bytes)
    std::memcpy(out, source + static_cast<size_t>(column) * bytes, bytes);
}

}  // namespace

int panels_of(int rows) { return (rows + kPanelRows - 1) / kPanelRows; }

bool takes_codes(WeightFormat format) { return shape_of(format).code_bits <= 8; }

WeightFormat format_of_ggml_type(int ggml_type) {
  const auto format = static_cast<WeightFormat>(ggml_type);
  switch (format) {
    case WeightFormat::kF32:
    case WeightFormat::kF16:
    case WeightFormat::kQ4_0:
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_0:
    case WeightFormat::kQ5_1:
    case WeightFormat::kQ8_0:
    case WeightFormat::kQ4_K:
    case WeightFormat::kQ5_K:
    case WeightFormat::kQ6_K:
    case WeightFormat::kBF16:
      return format;
  }
  throw std::invalid_argument("no CPU kernels for GGML type " + std::to_string(ggml_type));
}

PackedMatrix packed_view(WeightFormat format, int rows, int columns, const uint8_t* data) {
  check_shape(format, rows, columns);
  return {format, rows, columns, panel_bytes_of(format, columns), data};
}

size_t source_bytes(WeightFormat format, int rows, int columns) {
  check_shape(format, rows, columns);
  const GgmlBlock ggml = ggml_block(format);
  return static_cast<size_t>(rows) * static_cast<size_t>(columns / ggml.columns) *
         static_cast<size_t>(ggml.bytes);
}

size_t packed_bytes(WeightFormat format, int rows, int columns) {
  check_shape(format, rows, columns);
  return panel_bytes_of(format, columns) * static_cast<size_t>(panels_of(rows));
}

void pack_panels(const PackedMatrix& matrix, const uint8_t* source, int panel_begin, int panel_end,
                 uint8_t* destination) {
  const size_t row_bytes = source_bytes(matrix.format, 1, matrix.columns);
  for (int panel = panel_begin; panel < panel_end; ++panel) {
    uint8_t* out = destination + static_cast<size_t>(panel) * matrix.panel_bytes;
    std::memset(out, 0, matrix.panel_bytes);
    for (int row = 0; row < kPanelRows && panel * kPanelRows + row < matrix.rows; ++row) {
      const uint8_t* from = source + static_cast<size_t>(panel * kPanelRows + row) * row_bytes;
      if (takes_codes(matrix.format))
        pack_row(matrix, from, row, out);
      else
        pack_float_row(matrix, from, row, out);
    }
  }
}

PackedMatrix pack(WeightFormat format, const uint8_t* source, int rows, int columns,
                  uint8_t* destination) {
  const PackedMatrix matrix = packed_view(format, rows, columns, destination);
  pack_panels(matrix, source, 0, panels_of(rows), destination);
  return matrix;
}

void unpack_row(const PackedMatrix& matrix, int row, float* out) {
  const int panel = row / kPanelRows, lane = row % kPanelRows;
  if (!takes_codes(matrix.format)) {
    for (int column = 0; column < matrix.columns; ++column)
      out[column] = read_weight(matrix, panel, column, lane);
    return;
  }
  const bool mins = shape_of(matrix.format).mins;
  for (int block = 0; block < matrix.columns / kBlockColumns; ++block) {
    const RowBlock values = read_row_block(matrix, panel, block, lane);
    for (int column = 0; column < kBlockColumns; ++column) {
      const float product = values.scales[column / 16] * static_cast<float>(values.codes[column]);
      *out++ = mins ? product + values.min : product;  // + 0 would turn -0 into 0
    }
  }
}

}  // namespace triptych
