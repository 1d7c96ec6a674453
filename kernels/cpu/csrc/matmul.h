// Matrix products of activations and packed weights. The numbers are one definition, which every
// instruction set and every tile shape follows bit for bit:
//   quantised weights, blocks of 32 columns (Q6_K: halves of 16) ascending:
//     y = fma(float(sum of code * activation code, exact in int32), d_weight * d_activation, y)
//     y = fma(min_weight, sum_activation, y)                        if the format has mins
//   float weights, columns ascending: y = fma(weight, x, y)
// so a row's outputs depend neither on the rows beside it nor on how the work was split. Activation
// codes are of 16 bits, or bytes, whose products go four to a lane instead of two.
//
// Included by the files that are compiled with AVX flags; the rule of packed_matrix.h holds.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "packed_matrix.h"

namespace triptych {

// Largest activation code: 32767 keeps float32's accuracy in practice, up to 127 codes are bytes.
constexpr int kActivationLimit16 = 32767;
constexpr int kActivationLimit8 = 127;

// A block of activations whose largest magnitude is below this (2^-100) counts as zero: the inverse
// of its scale would overflow.
constexpr float kSmallestPeak = 7.888609052210118e-31f;

// One row's activations of 32 columns.
struct QuantizedBlock {
  float scale;       // absmax / limit of the block
  float sum;         // scale * code_sum
  int32_t code_sum;  // of `codes`
  int16_t codes[kBlockColumns];
};

// The same in bytes. Byte i is the code of column byte_column(i): 4-bit weights come apart into
// this order from their words in a panel with a mask alone.
struct ByteBlock {
  float scale;
  float sum;
  int32_t minus_sums[3];  // minus the sum of codes: of the block, its first half, its second
  int8_t codes[kBlockColumns];
};

// 0 4 1 5 2 6 3 7, of each 8 columns.
constexpr int byte_column(int index) {
  return index / 8 * 8 + index % 2 * 4 + index / 2 % 2 + index / 4 % 2 * 2;
}

// Activations; the memory is the caller's. Quantised formats read `blocks` or, when `limit` is at
// most 127, `bytes`, which are the same memory; float formats read `floats`.
struct QuantizedRows {
  QuantizedBlock* blocks;  // [rows][block_pitch]
  ByteBlock* bytes;        // [rows][block_pitch]
  size_t block_pitch;
  const float* floats;  // [rows][float_pitch]
  size_t float_pitch;
  int columns;
  int limit;  // largest code
};

// Bytes that `rows` rows of blocks need.
size_t quantized_bytes(int rows, int columns);

// QuantizedRows over `memory` (4-byte aligned, quantized_bytes() long). `floats` is left null.
QuantizedRows place_quantized_rows(void* memory, int columns, int limit);

// Columns [begin, end) of all rows, whole blocks; for quantize_rows.
QuantizedRows quantized_columns(const QuantizedRows& rows, int begin, int end);

struct MatmulKernels {
  // x [rows][pitch] float32 -> the blocks of rows row_begin.. of `out`; out.columns are read (a
  // multiple of 32) and out.limit is the largest code. A block with a NaN or infinity gets zero
  // codes and NaN scales, so that its row's outputs are NaN.
  void (*quantize_rows)(const float* x, size_t pitch, int rows, int row_begin,
                        const QuantizedRows& out);

  // out[row * out_pitch + n] = y (or += y), for rows [row_begin, row_end) of the activations and
  // the outputs n of panels [panel_begin, panel_end). Writes no output beyond weights.rows.
  void (*matmul)(const PackedMatrix& weights, const QuantizedRows& activations, int row_begin,
                 int row_end, int panel_begin, int panel_end, float* out, size_t out_pitch,
                 bool add);
};

extern const MatmulKernels kMatmulScalar;
extern const MatmulKernels kMatmulAvx2;
extern const MatmulKernels kMatmulAvx512;
extern const MatmulKernels kMatmulAvx512Vnni;

// For activations in bytes; float formats' products are the ones above.
extern const MatmulKernels kMatmulInt8Scalar;
extern const MatmulKernels kMatmulInt8Avx2;
extern const MatmulKernels kMatmulInt8Avx512;
extern const MatmulKernels kMatmulInt8Avx512Vnni;

}  // namespace triptych
