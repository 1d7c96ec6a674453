#include "packed_block.h"

#include <cstring>

#include "packed_formats.h"

namespace triptych {
namespace {

template <typename T>
T load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float half_at(const uint8_t* halves, int index) {
  return float_of_half(load<uint16_t>(halves + 2 * index));
}

void read_codes(const FormatShape& shape, const uint8_t* codes, int row, int32_t* out) {
  for (int column = 0; column < kBlockColumns; ++column) {
    const int pair = column / 2, lane = 2 * row + column % 2;
    if (shape.code_bits == 8) {
      out[column] = static_cast<int8_t>(codes[pair * 32 + lane]);
      continue;
    }
    const uint16_t word = load<uint16_t>(codes + (pair / 4 * 32 + lane) * 2);
    int32_t code = word >> 4 * (pair % 4) & 15;
    if (shape.code_bits == 5) code |= (load<uint16_t>(codes + 256 + lane * 2) >> pair & 1) << 4;
    out[column] = code - shape.offset;
  }
}

}  // namespace

float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7FFF;
  if (rest < 0x0400) {  // zero or subnormal: an exact multiple of 2^-24
    const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  if (rest < 0x7C00) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
  const uint32_t quiet = rest > 0x7C00 ? 0x00400000 : 0;
  return float_of_bits(sign | 0x7F800000 | rest << 13 | quiet);
}

RowBlock read_row_block(const PackedMatrix& matrix, int panel, int block, int row) {
  const FormatShape shape = shape_of(matrix.format);
  const uint8_t* start = matrix.data + static_cast<size_t>(panel) * matrix.panel_bytes;
  const uint8_t* scales = start + block_offset(shape, matrix.head_blocks, block);
  RowBlock out{};
  if (shape.grouped) {
    const uint8_t* head = start + head_offset(shape, matrix.head_blocks, block);
    out.scales[0] = out.scales[1] = half_at(head, row);
    out.min = out.scales[0] * half_at(head + 2 * kPanelRows, row);
  } else if (shape.super) {
    const uint8_t* head = start + head_offset(shape, matrix.head_blocks, block);
    const float d = half_at(head, row);
    for (int half = 0; half < 2; ++half) {
      const uint8_t scale = scales[half % shape.halves * kPanelRows + row];
      out.scales[half] =
          d * static_cast<float>(shape.mins ? int{scale} : int{static_cast<int8_t>(scale)});
    }
    if (shape.mins)
      out.min = half_at(head + 2 * kPanelRows, row) * static_cast<float>(scales[kPanelRows + row]);
  } else {
    out.scales[0] = out.scales[1] = half_at(scales, row);
    if (shape.mins) out.min = half_at(scales + 2 * kPanelRows, row);
  }
  read_codes(shape, scales + shape.scale_bytes, row, out.codes);
  return out;
}

void write_codes(WeightFormat format, const uint8_t* codes, int row, uint8_t* block) {
  const FormatShape shape = shape_of(format);
  for (int column = 0; column < kBlockColumns; ++column) {
    const int pair = column / 2, lane = 2 * row + column % 2;
    if (shape.code_bits == 8) {
      block[pair * 32 + lane] = codes[column];
      continue;
    }
    uint8_t* word = block + (pair / 4 * 32 + lane) * 2;
    word[pair % 4 / 2] |= static_cast<uint8_t>((codes[column] & 15) << 4 * (pair % 2));
    if (shape.code_bits == 5)
      block[256 + lane * 2 + pair / 8] |= static_cast<uint8_t>(codes[column] >> 4 << pair % 8);
  }
}

float read_weight(const PackedMatrix& matrix, int panel, int column, int row) {
  const size_t index = static_cast<size_t>(column) * kPanelRows + static_cast<size_t>(row);
  const uint8_t* start = matrix.data + static_cast<size_t>(panel) * matrix.panel_bytes;
  switch (matrix.format) {
    case WeightFormat::kF32:
      return load<float>(start + 4 * index);
    case WeightFormat::kBF16:
      return float_of_bits(static_cast<uint32_t>(load<uint16_t>(start + 2 * index)) << 16);
    default:
      return float_of_half(load<uint16_t>(start + 2 * index));
  }
}

}  // namespace triptych
