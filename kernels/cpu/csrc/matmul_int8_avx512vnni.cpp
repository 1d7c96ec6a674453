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
#include "machine_limits.h"
#include "matmul_lanes_avx512.h"
#include "matmul_tile.h"
#include "matmul_int8_lanes_avx512.h"
// clang-format on

namespace triptych {
namespace {

constexpr int kByteOffset = 128;  // added to 8-bit codes: the instruction wants them unsigned
constexpr int direct_byte_rows(int /*bits*/) { return 8; }
constexpr int wide_byte_rows(int /*bits*/) { return kWideRows; }
constexpr int byte_chains_of_row(int rows) { return chains_of_row(rows); }
constexpr const MatmulKernels& kFloatKernels = kMatmulAvx512Vnni;

TRIPTYCH_INLINE Bytes with_byte_offset(Bytes codes) {
  return _mm512_xor_si512(codes, _mm512_set1_epi8(-kByteOffset));
}

// Sums of products of a row, by lanes.
template <int /*kBits*/>
struct ByteSums {
  Sums sums;

  TRIPTYCH_INLINE void start(int32_t value) { sums = all_sums(value); }
  TRIPTYCH_INLINE void add(Bytes codes, Quad quad, int /*index*/) {
    sums = _mm512_dpbusd_epi32(sums, codes, quad);
  }
  TRIPTYCH_INLINE Sums total() const { return sums; }
};

}  // namespace
}  // namespace triptych

// clang-format off: as above
#include "matmul_int8_tile.h"
#include "matmul_int8_body.h"
// clang-format on

namespace triptych {

const MatmulKernels kMatmulInt8Avx512Vnni = {quantize_bytes, matmul_bytes};
uint64_t multiply_add_bytes_avx512vnni(uint64_t rounds) { return multiply_add_bytes(rounds); }

}  // namespace triptych
