// Compiled with AVX-512 F, BW, VL and VNNI flags.
#include <immintrin.h>

namespace triptych {
namespace {

inline __attribute__((always_inline)) __m512i multiply_add(__m512i sums, __m512i words,
                                                           __m512i pair) {
  return _mm512_dpwssd_epi32(sums, words, pair);
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

const MatmulKernels kMatmulAvx512Vnni = {quantize_rows_lanes, matmul_lanes};
const LimitKernels kLimitsAvx512Vnni = {multiply_adds_lanes, multiply_add_bytes_avx512vnni,
                                        read_lanes};

}  // namespace triptych
