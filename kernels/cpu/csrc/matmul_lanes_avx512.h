// The 16 rows of a panel in one AVX-512 register; what matmul_body.h is written in. Included after
// the file has defined
//   __m512i multiply_add(__m512i sums, __m512i words, __m512i pair)
// which adds to each 32-bit lane the two products of its 16-bit halves.
#include <immintrin.h>

#include "matmul.h"

#define TRIPTYCH_INLINE inline __attribute__((always_inline))

namespace triptych {
namespace {

constexpr int kWidePanels = 2;  // 2 panels by 6 rows: 12 sums and 12 outputs in 32 registers
constexpr int kWideRows = 6;
constexpr int kMostDirectRows = 8;

// Into how many sums a row's products of a block go, so that they do not wait for one another: a
// multiply-add takes 5 cycles, and two can start in one.
constexpr int chains_of_row(int rows) { return rows <= 4 ? 4 : 2; }

using Floats = __m512;  // one per row
using Sums = __m512i;   // int32, one per row
using Words = __m512i;  // two int16 per row
using Pair = __m512i;   // two int16, the same for all rows
using LaneMask = __mmask16;

TRIPTYCH_INLINE Words load_words(const void* from) { return _mm512_loadu_si512(from); }
TRIPTYCH_INLINE void store_words(void* to, Words words) { _mm512_store_si512(to, words); }
TRIPTYCH_INLINE Words words_of_bytes(const uint8_t* from) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
TRIPTYCH_INLINE Words nibble(Words words, int index) {
  const Words low = _mm512_set1_epi16(15);
  if (index == 0) return _mm512_and_si512(words, low);
  if (index == 3) return _mm512_srli_epi16(words, 12);
  return _mm512_and_si512(_mm512_srli_epi16(words, static_cast<unsigned>(4 * index)), low);
}
// `codes` with bit `index` of `plane` as their fifth.
TRIPTYCH_INLINE Words with_fifth_bit(Words codes, Words plane, int index) {
  const Words bit = index < 4 ? _mm512_slli_epi16(plane, static_cast<unsigned>(4 - index))
                              : _mm512_srli_epi16(plane, static_cast<unsigned>(index - 4));
  return _mm512_ternarylogic_epi32(codes, bit, _mm512_set1_epi16(16), 0xF8);  // a | (b & c)
}
TRIPTYCH_INLINE Words subtract(Words words, int16_t offset) {
  return _mm512_sub_epi16(words, _mm512_set1_epi16(offset));
}
TRIPTYCH_INLINE Pair broadcast_pair(const int16_t* from) {
  int32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return _mm512_set1_epi32(pair);
}

TRIPTYCH_INLINE Sums all_sums(int32_t value) { return _mm512_set1_epi32(value); }
TRIPTYCH_INLINE Sums dot(Sums sums, Words words, Pair pair) {
  return multiply_add(sums, words, pair);
}
TRIPTYCH_INLINE Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
// The compiler has to have the value, and to believe that it may have changed.
TRIPTYCH_INLINE void touch(Words& words) { asm volatile("" : "+v"(words)); }
TRIPTYCH_INLINE int32_t total(Sums sums) { return _mm512_reduce_add_epi32(sums); }
TRIPTYCH_INLINE Floats floats_of(Sums sums) { return _mm512_cvtepi32_ps(sums); }

TRIPTYCH_INLINE Floats all_floats(float value) { return _mm512_set1_ps(value); }
TRIPTYCH_INLINE Floats load_floats(const void* from) { return _mm512_loadu_ps(from); }
TRIPTYCH_INLINE void store_floats(float* to, Floats floats) { _mm512_storeu_ps(to, floats); }
TRIPTYCH_INLINE Floats load_halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
TRIPTYCH_INLINE Floats load_bfloats(const uint8_t* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
TRIPTYCH_INLINE Floats load_unsigned_bytes(const uint8_t* from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
TRIPTYCH_INLINE Floats load_signed_bytes(const uint8_t* from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
TRIPTYCH_INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
TRIPTYCH_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}

TRIPTYCH_INLINE LaneMask first_lanes(int count) { return static_cast<LaneMask>((1u << count) - 1); }
TRIPTYCH_INLINE void store_lanes(float* to, LaneMask lanes, Floats floats, bool add) {
  if (add) floats = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), floats);
  _mm512_mask_storeu_ps(to, lanes, floats);
}

TRIPTYCH_INLINE uint32_t largest_magnitude(const float* x) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(
      _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(x), magnitude),
                       _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude))));
}
// Codes of x * factor (all 0 unless `finite`), rounded to even; their sum.
TRIPTYCH_INLINE int32_t store_codes(const float* x, float factor, bool finite, int16_t* codes) {
  const __mmask16 kept = finite ? 0xFFFF : 0;
  const __m512 factors = _mm512_set1_ps(factor);
  const __m512i low = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(_mm512_loadu_ps(x), factors));
  const __m512i high =
      _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(_mm512_loadu_ps(x + 16), factors));
  auto* to = reinterpret_cast<__m256i*>(codes);
  _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(low));
  _mm256_storeu_si256(to + 1, _mm512_cvtepi32_epi16(high));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
}

}  // namespace
}  // namespace triptych
