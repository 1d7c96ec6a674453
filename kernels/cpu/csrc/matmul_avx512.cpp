// Compiled with AVX-512 F, BW and VL flags.
#include <immintrin.h>

namespace triptych {
namespace {

inline __attribute__((always_inline)) __m512i multiply_add(__m512i sums, __m512i words,
                                                           __m512i pair) {
  sums = _mm512_add_epi32(sums, _mm512_madd_epi16(words, pair));
  asm("" : "+v"(sums));  // keeps the order of additions, see matmul_lanes_avx2.h
  return sums;
}

}  // namespace
}  // namespace triptych

// clang-format off: each is written in the terms of the one before
#include "matmul_lanes_avx512.h"
#include "matmul_tile.h"
#include "matmul_body.h"
#include "machine_limits_body.h"
// clang-format on

namespace triptych {

const MatmulKernels kMatmulAvx512 = {quantize_rows_lanes, matmul_lanes};
const LimitKernels kLimitsAvx512 = {multiply_adds_lanes, multiply_add_bytes_avx512, read_lanes};

}  // namespace triptych
