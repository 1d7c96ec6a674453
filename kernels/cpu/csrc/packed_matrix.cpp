#include "packed_matrix.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "ggml_blocks.h"
#include "packed_block.h"
#include "packed_formats.h"

namespace triptych {
namespace {

int head_blocks_of(WeightType type) {
  return shape_of(type.format).super ? kSuperBlocks : type.group_blocks;
}

// Columns that share what a source stores once.
int unit_columns(WeightType type) {
  return type.group_blocks > 0 ? type.group_blocks * kBlockColumns
                               : ggml_block(type.format).columns;
}

size_t panel_bytes_of(WeightType type, int columns) {
  const FormatShape shape = shape_of(type.format);
  if (shape.code_bits > 8)
    return static_cast<size_t>(columns) * kPanelRows * static_cast<size_t>(shape.code_bits / 8);
  const int blocks = columns / kBlockColumns, head_blocks = head_blocks_of(type);
  const size_t heads = head_blocks > 0 ? static_cast<size_t>(blocks / head_blocks) : 0;
  return heads * static_cast<size_t>(shape.head_bytes) +
         static_cast<size_t>(blocks) * static_cast<size_t>(shape.block_bytes);
}

void check_shape(WeightType type, int rows, int columns) {
  const int block = unit_columns(type);
  if (rows < 1 || columns < 1 || columns % block != 0)
    throw std::invalid_argument(
        "a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) + " of " +
        (type.group_blocks > 0 ? "format " : "GGML type ") +
        std::to_string(static_cast<int>(type.format)) +
        " cannot be packed: rows and columns must be positive, columns a multiple of " +
        std::to_string(block));
}

void pack_row(const PackedMatrix& matrix, const uint8_t* source, int row, uint8_t* panel) {
  const FormatShape shape = shape_of(matrix.format);
  const GgmlBlock ggml = ggml_block(matrix.format);
  const auto at = [row](uint8_t* base, int bytes) { return base + row * bytes; };
  for (int block = 0; block < matrix.columns / kBlockColumns; ++block) {
    const uint8_t* from = source + block * kBlockColumns / ggml.columns * ggml.bytes;
    const GgmlCodes values = read_ggml_codes(matrix.format, from, block % kSuperBlocks);
    uint8_t* scales = panel + block_offset(shape, matrix.head_blocks, block);
    if (shape.super) {
      uint8_t* head = panel + head_offset(shape, matrix.head_blocks, block);
      std::memcpy(at(head, 2), &values.d, 2);
      if (shape.mins) std::memcpy(at(head + 2 * kPanelRows, 2), &values.m, 2);
      *at(scales, 1) = values.scales[0];
      if (shape.halves == 2) *at(scales + kPanelRows, 1) = values.scales[1];
      if (shape.mins) *at(scales + kPanelRows, 1) = values.min;
    } else {
      std::memcpy(at(scales, 2), &values.d, 2);
      if (shape.mins) std::memcpy(at(scales + 2 * kPanelRows, 2), &values.m, 2);
    }
    write_codes(matrix.format, values.codes, row, scales + shape.scale_bytes);
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

WeightType weight_type_of(int number) {
  const auto format = static_cast<WeightFormat>(number & 0xFFFF);
  const int group_blocks = number >> 16;
  if ((format == WeightFormat::kInt4 || format == WeightFormat::kInt8) && group_blocks > 0)
    return {format, group_blocks};
  switch (static_cast<WeightFormat>(number)) {
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
      return {format};
    case WeightFormat::kInt4:
    case WeightFormat::kInt8:
      break;  // without its group
  }
  throw std::invalid_argument("no CPU kernels for GGML type " + std::to_string(number));
}

PackedMatrix packed_view(WeightType type, int rows, int columns, const uint8_t* data) {
  check_shape(type, rows, columns);
  return {type.format, rows, columns, panel_bytes_of(type, columns), data, head_blocks_of(type)};
}

size_t source_bytes(WeightType type, int rows, int columns) {
  check_shape(type, rows, columns);
  const GgmlBlock ggml = ggml_block(type.format);
  return static_cast<size_t>(rows) * static_cast<size_t>(columns / ggml.columns) *
         static_cast<size_t>(ggml.bytes);
}

size_t packed_bytes(WeightType type, int rows, int columns) {
  check_shape(type, rows, columns);
  return panel_bytes_of(type, columns) * static_cast<size_t>(panels_of(rows));
}

void pack_panels(const PackedMatrix& matrix, const uint8_t* source, int panel_begin, int panel_end,
                 uint8_t* destination) {
  const size_t row_bytes = source_bytes({matrix.format}, 1, matrix.columns);
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

PackedMatrix pack(WeightType type, const uint8_t* source, int rows, int columns,
                  uint8_t* destination) {
  const PackedMatrix matrix = packed_view(type, rows, columns, destination);
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
