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
#include "machine_limits.h"
#include "matmul_lanes_avx512.h"
#include "matmul_tile.h"
#include "matmul_int8_lanes_avx512.h"
// clang-format on

namespace triptych {
namespace {

constexpr int kByteOffset = 0;  // what is added to 8-bit codes: they stay signed
constexpr int direct_byte_rows(int /*bits*/) { return 4; }
constexpr int wide_byte_rows(int bits) { return bits == 4 ? 6 : 4; }
constexpr int byte_chains_of_row(int /*rows*/) { return 1; }
constexpr const MatmulKernels& kFloatKernels = kMatmulAvx512;

TRIPTYCH_INLINE Bytes with_byte_offset(Bytes codes) { return codes; }

// Sums of products of a row, by lanes; pairs of products are added in 16 bits while they fit.
template <int kBits>
struct ByteSums {
  static constexpr int kNarrow = kBits == 4 ? 8 : kBits == 5 ? 4 : 1;  // 8 * 2 * 15 * 127 < 2^15
  Sums sums;
  Words narrow;

  TRIPTYCH_INLINE void start(int32_t value) { sums = all_sums(value); }
  // The `index`th addition since the start, of a multiple of kNarrow.
  TRIPTYCH_INLINE void add(Bytes codes, Quad quad, int index) {
    if constexpr (kBits == 8) {
      // Unsigned bytes by signed ones, two products to a sum that must fit 16 bits: codes, at most
      // 128 in magnitude, give their signs away.
      quad = _mm512_mask_sub_epi8(quad, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), quad);
      codes = _mm512_abs_epi8(codes);
    }
    const Words products = _mm512_maddubs_epi16(codes, quad);
    narrow = index % kNarrow == 0 ? products : _mm512_add_epi16(narrow, products);
    asm("" : "+v"(narrow));  // keeps the order of additions
    if (index % kNarrow == kNarrow - 1) sums = dot(sums, narrow, _mm512_set1_epi16(1));
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

const MatmulKernels kMatmulInt8Avx512 = {quantize_bytes, matmul_bytes};
uint64_t multiply_add_bytes_avx512(uint64_t rounds) { return multiply_add_bytes(rounds); }

}  // namespace triptych
