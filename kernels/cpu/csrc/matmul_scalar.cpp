// The definition in plain C++: what every other instruction set must equal bit for bit.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine_limits.h"
#include "matmul.h"
#include "packed_block.h"
#include "packed_formats.h"

namespace triptych {
namespace {

constexpr uint32_t kInfinityBits = 0x7F800000;
constexpr float kRoundingShift =
    12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, to even

void quantize_block(const float* x, int limit, QuantizedBlock& out) {
  uint32_t largest = 0;  // as bits: NaN orders above infinity above every number
  for (int i = 0; i < kBlockColumns; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    if (bits > largest) largest = bits;
  }
  float peak;
  std::memcpy(&peak, &largest, sizeof peak);
  float inverse = static_cast<float>(limit) / peak;
  out.scale = peak / static_cast<float>(limit);
  if (largest >= kInfinityBits) {
    out.scale = NAN;
    inverse = 0.0f;
  } else if (peak < kSmallestPeak) {
    out.scale = inverse = 0.0f;
  }
  out.code_sum = 0;
  for (int i = 0; i < kBlockColumns; ++i) {
    const float scaled = largest < kInfinityBits ? x[i] * inverse : 0.0f;
    out.codes[i] = static_cast<int16_t>(scaled + kRoundingShift - kRoundingShift);
    out.code_sum += out.codes[i];
  }
  out.sum = out.scale * static_cast<float>(out.code_sum);
}

void quantize_block(const float* x, int limit, ByteBlock& out) {
  QuantizedBlock wide;
  quantize_block(x, limit, wide);
  out.scale = wide.scale;
  out.sum = wide.sum;
  out.minus_sums[1] = out.minus_sums[2] = 0;
  for (int i = 0; i < kBlockColumns; ++i) {
    out.codes[i] = static_cast<int8_t>(wide.codes[byte_column(i)]);
    out.minus_sums[i < kBlockColumns / 2 ? 1 : 2] -= out.codes[i];
  }
  out.minus_sums[0] = -wide.code_sum;
}

QuantizedBlock widened(const ByteBlock& block) {
  QuantizedBlock out{block.scale, block.sum, -block.minus_sums[0], {}};
  for (int i = 0; i < kBlockColumns; ++i) out.codes[byte_column(i)] = block.codes[i];
  return out;
}
const QuantizedBlock& widened(const QuantizedBlock& block) { return block; }

template <typename Block>
Block* blocks_of(const QuantizedRows& rows, int row) {
  const size_t offset = static_cast<size_t>(row) * rows.block_pitch;
  if constexpr (std::is_same_v<Block, ByteBlock>)
    return rows.bytes + offset;
  else
    return rows.blocks + offset;
}

template <typename Block>
void quantize_rows_scalar(const float* x, size_t pitch, int rows, int row_begin,
                          const QuantizedRows& out) {
  for (int row = 0; row < rows; ++row) {
    Block* to = blocks_of<Block>(out, row_begin + row);
    for (int block = 0; block < out.columns / kBlockColumns; ++block)
      quantize_block(x + static_cast<size_t>(row) * pitch + block * kBlockColumns, out.limit,
                     to[block]);
  }
}

int32_t dot16(const int32_t* codes, const int16_t* activations) {
  int32_t sum = 0;
  for (int i = 0; i < kBlockColumns / 2; ++i) sum += codes[i] * activations[i];
  return sum;
}

template <typename Block>
float output_of_codes(const PackedMatrix& weights, const QuantizedRows& activations, int row,
                      int panel, int lane) {
  const FormatShape shape = shape_of(weights.format);
  const Block* blocks = blocks_of<Block>(activations, row);
  float y = 0.0f;
  for (int block = 0; block < weights.columns / kBlockColumns; ++block) {
    const QuantizedBlock& x = widened(blocks[block]);
    const RowBlock values = read_row_block(weights, panel, block, lane);
    const int32_t low = dot16(values.codes, x.codes);
    const int32_t high = dot16(values.codes + 16, x.codes + 16);
    if (shape.halves == 2) {
      y = std::fma(static_cast<float>(low), values.scales[0] * x.scale, y);
      y = std::fma(static_cast<float>(high), values.scales[1] * x.scale, y);
    } else {
      y = std::fma(static_cast<float>(low + high), values.scales[0] * x.scale, y);
    }
    if (shape.mins) y = std::fma(values.min, x.sum, y);
  }
  return y;
}

float output_of_floats(const PackedMatrix& weights, const QuantizedRows& activations, int row,
                       int panel, int lane) {
  const float* x = activations.floats + static_cast<size_t>(row) * activations.float_pitch;
  float y = 0.0f;
  for (int column = 0; column < weights.columns; ++column)
    y = std::fma(read_weight(weights, panel, column, lane), x[column], y);
  return y;
}

template <typename Block>
void matmul_scalar(const PackedMatrix& weights, const QuantizedRows& activations, int row_begin,
                   int row_end, int panel_begin, int panel_end, float* out, size_t out_pitch,
                   bool add) {
  const auto output = takes_codes(weights.format) ? output_of_codes<Block> : output_of_floats;
  for (int panel = panel_begin; panel < panel_end; ++panel) {
    for (int row = row_begin; row < row_end; ++row) {
      for (int lane = 0; lane < kPanelRows; ++lane) {
        const int n = panel * kPanelRows + lane;
        if (n >= weights.rows) break;
        float& to = out[static_cast<size_t>(row) * out_pitch + static_cast<size_t>(n)];
        const float y = output(weights, activations, row, panel, lane);
        to = add ? to + y : y;
      }
    }
  }
}

// Of 16-bit codes and of bytes alike: this is as wide as it gets.
uint64_t multiply_adds_scalar(uint64_t rounds) {
  int32_t value = 1, sums[4] = {};
  for (uint64_t round = 0; round < rounds; ++round) {
    for (int32_t& sum : sums) {
      asm volatile("" : "+r"(value));  // or else one product would do for all sums
      sum += value * value;
    }
  }
  for (int32_t& sum : sums) asm volatile("" : "+r"(sum));
  return rounds * 4;
}

int32_t read_scalar(const uint8_t* bytes, size_t size) {
  uint64_t sums[2] = {}, words[2];
  for (size_t i = 0; i < size; i += sizeof words) {
    std::memcpy(words, bytes + i, sizeof words);
    sums[0] += words[0];
    sums[1] += words[1];
  }
  return static_cast<int32_t>(sums[0] + sums[1]);
}

}  // namespace

const MatmulKernels kMatmulScalar = {quantize_rows_scalar<QuantizedBlock>,
                                     matmul_scalar<QuantizedBlock>};
const MatmulKernels kMatmulInt8Scalar = {quantize_rows_scalar<ByteBlock>, matmul_scalar<ByteBlock>};
const LimitKernels kLimitsScalar = {multiply_adds_scalar, multiply_adds_scalar, read_scalar};

}  // namespace triptych
