// The 16 rows of a panel in two AVX2 registers; what matmul_body.h is written in.
#include <immintrin.h>

#include "matmul.h"

#define TRIPTYCH_INLINE inline __attribute__((always_inline))

namespace triptych {
namespace {

constexpr int kWidePanels = 1;  // 1 panel by 4 rows: 8 sums in 16 registers, outputs in memory
constexpr int kWideRows = 4;
constexpr int kMostDirectRows = 2;

// Into how many sums a row's products of a block go: an addition takes one cycle.
constexpr int chains_of_row(int /*rows*/) { return 1; }

struct Floats {  // one per row
  __m256 low, high;
};
struct Words {  // two int16 per row
  __m256i low, high;
};
using Sums = Words;    // int32, one per row
using Pair = __m256i;  // two int16, the same for all rows
using LaneMask = Words;

TRIPTYCH_INLINE __m256i load256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
TRIPTYCH_INLINE __m128i load128(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

TRIPTYCH_INLINE Words load_words(const void* from) {
  return {load256(from), load256(static_cast<const uint8_t*>(from) + 32)};
}
TRIPTYCH_INLINE void store_words(void* to, Words words) {
  _mm256_store_si256(static_cast<__m256i*>(to), words.low);
  _mm256_store_si256(static_cast<__m256i*>(to) + 1, words.high);
}
TRIPTYCH_INLINE Words words_of_bytes(const uint8_t* from) {
  return {_mm256_cvtepi8_epi16(load128(from)), _mm256_cvtepi8_epi16(load128(from + 16))};
}
TRIPTYCH_INLINE __m256i nibble(__m256i words, int index) {
  const __m256i low = _mm256_set1_epi16(15);
  if (index == 0) return _mm256_and_si256(words, low);
  if (index == 3) return _mm256_srli_epi16(words, 12);
  return _mm256_and_si256(_mm256_srli_epi16(words, 4 * index), low);
}
TRIPTYCH_INLINE Words nibble(Words words, int index) {
  return {nibble(words.low, index), nibble(words.high, index)};
}
TRIPTYCH_INLINE __m256i with_fifth_bit(__m256i codes, __m256i plane, int index) {
  const __m256i bit =
      index < 4 ? _mm256_slli_epi16(plane, 4 - index) : _mm256_srli_epi16(plane, index - 4);
  return _mm256_or_si256(codes, _mm256_and_si256(bit, _mm256_set1_epi16(16)));
}
// `codes` with bit `index` of `plane` as their fifth.
TRIPTYCH_INLINE Words with_fifth_bit(Words codes, Words plane, int index) {
  return {with_fifth_bit(codes.low, plane.low, index),
          with_fifth_bit(codes.high, plane.high, index)};
}
TRIPTYCH_INLINE Words subtract(Words words, int16_t offset) {
  const __m256i offsets = _mm256_set1_epi16(offset);
  return {_mm256_sub_epi16(words.low, offsets), _mm256_sub_epi16(words.high, offsets)};
}
TRIPTYCH_INLINE Pair broadcast_pair(const int16_t* from) {
  int32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return _mm256_set1_epi32(pair);
}

TRIPTYCH_INLINE Sums all_sums(int32_t value) {
  return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}
// The empty assembly keeps the order of additions: the compiler would rather hold all products of a
// block until it can add them as a tree, and spill them.
TRIPTYCH_INLINE Sums dot(Sums sums, Words words, Pair pair) {
  sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(words.low, pair));
  sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(words.high, pair));
  asm("" : "+x"(sums.low), "+x"(sums.high));
  return sums;
}
TRIPTYCH_INLINE Sums add(Sums a, Sums b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
// The compiler has to have the value, and to believe that it may have changed.
TRIPTYCH_INLINE void touch(Words& words) { asm volatile("" : "+x"(words.low), "+x"(words.high)); }
TRIPTYCH_INLINE int32_t total(__m256i sums) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}
TRIPTYCH_INLINE int32_t total(Sums sums) { return total(_mm256_add_epi32(sums.low, sums.high)); }
TRIPTYCH_INLINE Floats floats_of(Sums sums) {
  return {_mm256_cvtepi32_ps(sums.low), _mm256_cvtepi32_ps(sums.high)};
}

TRIPTYCH_INLINE Floats all_floats(float value) {
  return {_mm256_set1_ps(value), _mm256_set1_ps(value)};
}
TRIPTYCH_INLINE Floats load_floats(const void* from) {
  const auto* floats = static_cast<const float*>(from);
  return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + 8)};
}
TRIPTYCH_INLINE void store_floats(float* to, Floats floats) {
  _mm256_storeu_ps(to, floats.low);
  _mm256_storeu_ps(to + 8, floats.high);
}
TRIPTYCH_INLINE Floats load_halves(const uint8_t* from) {
  return {_mm256_cvtph_ps(load128(from)), _mm256_cvtph_ps(load128(from + 16))};
}
TRIPTYCH_INLINE __m256 load_bfloats8(const uint8_t* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(from)), 16));
}
TRIPTYCH_INLINE Floats load_bfloats(const uint8_t* from) {
  return {load_bfloats8(from), load_bfloats8(from + 16)};
}
TRIPTYCH_INLINE Floats load_unsigned_bytes(const uint8_t* from) {
  const __m128i bytes = load128(from);
  return floats_of({_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
TRIPTYCH_INLINE Floats load_signed_bytes(const uint8_t* from) {
  const __m128i bytes = load128(from);
  return floats_of({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
TRIPTYCH_INLINE Floats multiply(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
TRIPTYCH_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

TRIPTYCH_INLINE LaneMask first_lanes(int count) {
  const __m256i counts = _mm256_set1_epi32(count);
  return {_mm256_cmpgt_epi32(counts, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(counts, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}
TRIPTYCH_INLINE void store_lanes8(float* to, __m256i lanes, __m256 floats, bool add) {
  if (add) floats = _mm256_add_ps(_mm256_maskload_ps(to, lanes), floats);
  _mm256_maskstore_ps(to, lanes, floats);
}
TRIPTYCH_INLINE void store_lanes(float* to, LaneMask lanes, Floats floats, bool add) {
  store_lanes8(to, lanes.low, floats.low, add);
  store_lanes8(to + 8, lanes.high, floats.high, add);
}

TRIPTYCH_INLINE uint32_t largest_magnitude(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < kBlockColumns; i += 8)
    largest = _mm256_max_epi32(largest, _mm256_and_si256(load256(x + i), magnitude));
  __m128i four =
      _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
}
// Codes of x * factor (all 0 unless `finite`), rounded to even; their sum.
TRIPTYCH_INLINE int32_t store_codes(const float* x, float factor, bool finite, int16_t* codes) {
  const __m256 factors = _mm256_set1_ps(factor);
  const __m256i kept = _mm256_set1_epi32(finite ? -1 : 0);
  __m256i sums = _mm256_setzero_si256();
  for (int i = 0; i < kBlockColumns; i += 16) {
    const __m256i low =
        _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factors)), kept);
    const __m256i high = _mm256_and_si256(
        _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factors)), kept);
    // packs works in 128-bit lanes; 0xD8 puts the quarters back in order.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), packed);
    sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
  }
  return total(sums);
}

}  // namespace
}  // namespace triptych
