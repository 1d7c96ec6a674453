#include "ggml_blocks.h"

#include <cstring>

namespace triptych {
namespace {

uint16_t half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return half;
}

// 16 bytes: columns 0..15 in the low halves, 16..31 in the high ones.
void read_nibbles(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[i + 16] = bytes[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((bytes[i / 8] >> i % 8 & 1) << 4);
}

// Of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minimums in 12 bytes.
void read_six_bit_scales(const uint8_t* bytes, int part, GgmlCodes& out) {
  if (part < 4) {
    out.scales[0] = bytes[part] & 63;
    out.min = bytes[part + 4] & 63;
  } else {
    out.scales[0] = static_cast<uint8_t>((bytes[part + 4] & 15) | bytes[part - 4] >> 6 << 4);
    out.min = static_cast<uint8_t>(bytes[part + 4] >> 4 | bytes[part] >> 6 << 4);
  }
}

// d, dmin, scales[12], (Q5_K: fifth bits [32]), nibbles [128]; part 2i is the low halves of 32
// bytes, part 2i + 1 the high ones.
GgmlCodes read_k4_or_k5(const uint8_t* block, int part, bool fifth) {
  GgmlCodes out{};
  out.d = half_at(block);
  out.m = half_at(block + 2) ^ 0x8000;
  read_six_bit_scales(block + 4, part, out);
  const uint8_t* nibbles = block + (fifth ? 48 : 16) + part / 2 * 32;
  for (int i = 0; i < 32; ++i) {
    out.codes[i] = nibbles[i] >> part % 2 * 4 & 15;
    if (fifth) out.codes[i] |= static_cast<uint8_t>((block[16 + i] >> part & 1) << 4);
  }
  return out;
}

// Low nibbles [128], high pairs of bits [64], int8 scales [16], d. Halves of 128 columns; in each,
// part q takes pair q of the 32 high bytes and nibble q / 2 of low bytes 32 * (q % 2) onwards.
GgmlCodes read_k6(const uint8_t* block, int part) {
  GgmlCodes out{};
  const int half = part / 4, quarter = part % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  for (int i = 0; i < 32; ++i) {
    const int code = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
    out.codes[i] = static_cast<uint8_t>(code - 32);
  }
  std::memcpy(out.scales, block + 192 + part * 2, 2);
  out.d = half_at(block + 208);
  return out;
}

}  // namespace

GgmlBlock ggml_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return {1, 4};
    case WeightFormat::kF16:
    case WeightFormat::kBF16:
      return {1, 2};
    case WeightFormat::kQ4_0:
      return {32, 18};
    case WeightFormat::kQ4_1:
      return {32, 20};
    case WeightFormat::kQ5_0:
      return {32, 22};
    case WeightFormat::kQ5_1:
      return {32, 24};
    case WeightFormat::kQ8_0:
      return {32, 34};
    case WeightFormat::kQ4_K:
      return {256, 144};
    case WeightFormat::kQ5_K:
      return {256, 176};
    case WeightFormat::kQ6_K:
      break;
    case WeightFormat::kInt4:
    case WeightFormat::kInt8:
      return {32, 32};  // a byte a code, and the rest elsewhere
  }
  return {256, 210};
}

GgmlCodes read_ggml_codes(WeightFormat format, const uint8_t* block, int part) {
  if (format == WeightFormat::kQ4_K) return read_k4_or_k5(block, part, false);
  if (format == WeightFormat::kQ5_K) return read_k4_or_k5(block, part, true);
  if (format == WeightFormat::kQ6_K) return read_k6(block, part);
  GgmlCodes out{};
  out.d = half_at(block);
  const uint8_t* rest = block + 2;
  if (format == WeightFormat::kQ8_0) {
    std::memcpy(out.codes, rest, 32);
    return out;
  }
  if (format == WeightFormat::kQ4_1 || format == WeightFormat::kQ5_1) {
    out.m = half_at(rest);
    rest += 2;
  }
  const bool fifth = format == WeightFormat::kQ5_0 || format == WeightFormat::kQ5_1;
  read_nibbles(fifth ? rest + 4 : rest, out.codes);
  if (fifth) add_fifth_bits(rest, out.codes);
  return out;
}

}  // namespace triptych
