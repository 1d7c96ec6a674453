// Sixteen float lanes as two AVX2 vectors; compiled with AVX2 and FMA flags. The meaning of each
// function is lanes_scalar.h's, and so are its bits.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace triptych {
namespace {

constexpr int kTileRows = 6;
constexpr int kTileVectors = 1;

struct Lanes {
  __m256 low, high;
};

inline Lanes set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline __m256 widen(const uint16_t* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Lanes load(const uint16_t* from) { return {widen(from), widen(from + 8)}; }
inline Lanes load(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline __m256i before(int count) {  // all ones in lanes below count
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Lanes load_part(const float* from, int count) {
  return {_mm256_maskload_ps(from, before(count)), _mm256_maskload_ps(from + 8, before(count - 8))};
}
inline void store(float* to, const Lanes& a) {
  _mm256_storeu_ps(to, a.low);
  _mm256_storeu_ps(to + 8, a.high);
}
inline __m256i round_bfloat16(__m256 a) {  // in the low half of each lane
  const __m256i bits = _mm256_castps_si256(a), upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
inline void store(uint16_t* to, const Lanes& a) {
  const __m256i mixed = _mm256_packus_epi32(round_bfloat16(a.low), round_bfloat16(a.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xD8));
}
inline void store_part(float* to, const Lanes& a, int count) {
  _mm256_maskstore_ps(to, before(count), a.low);
  _mm256_maskstore_ps(to + 8, before(count - 8), a.high);
}
inline Lanes add(const Lanes& a, const Lanes& b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Lanes sub(const Lanes& a, const Lanes& b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Lanes mul(const Lanes& a, const Lanes& b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Lanes div(const Lanes& a, const Lanes& b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes negated_fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Lanes max(const Lanes& a, const Lanes& b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Lanes min(const Lanes& a, const Lanes& b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Lanes within(const Lanes& a, int begin, int end, float otherwise) {
  const __m256 other = _mm256_set1_ps(otherwise);
  const __m256i low = _mm256_andnot_si256(before(begin), before(end));
  const __m256i high = _mm256_andnot_si256(before(begin - 8), before(end - 8));
  return {_mm256_blendv_ps(other, a.low, _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(other, a.high, _mm256_castsi256_ps(high))};
}
inline __m256 times_power(__m256 a, __m256 power) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(power), 23)));
}
inline Lanes times_power(const Lanes& a, const Lanes& power) {
  return {times_power(a.low, power.low), times_power(a.high, power.high)};
}
inline float first(const Lanes& a) { return _mm256_cvtss_f32(a.low); }
inline float sum(const Lanes& a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float peak(const Lanes& a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace
}  // namespace triptych
