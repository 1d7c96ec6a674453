// Sixteen float lanes as one AVX-512 vector; compiled with AVX-512 F, BW and VL flags. The meaning
// of each function is lanes_scalar.h's, and so are its bits.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace triptych {
namespace {

constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;

struct Lanes {
  __m512 all;
};

inline Lanes set1(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Lanes load(const uint16_t* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline Lanes load(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline __mmask16 before(int count) {  // ones in lanes below count, 0 <= count <= 16
  return static_cast<__mmask16>((1u << count) - 1);
}
inline Lanes load_part(const float* from, int count) {
  return {_mm512_maskz_loadu_ps(before(count), from)};
}
inline void store(float* to, const Lanes& a) { _mm512_storeu_ps(to, a.all); }
inline void store(uint16_t* to, const Lanes& a) {
  const __m512i bits = _mm512_castps_si512(a.all), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.all, a.all, _CMP_UNORD_Q);
  const __m512i half = _mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(half));
}
inline void store_part(float* to, const Lanes& a, int count) {
  _mm512_mask_storeu_ps(to, before(count), a.all);
}
inline Lanes add(const Lanes& a, const Lanes& b) { return {_mm512_add_ps(a.all, b.all)}; }
inline Lanes sub(const Lanes& a, const Lanes& b) { return {_mm512_sub_ps(a.all, b.all)}; }
inline Lanes mul(const Lanes& a, const Lanes& b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline Lanes div(const Lanes& a, const Lanes& b) { return {_mm512_div_ps(a.all, b.all)}; }
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {_mm512_fmadd_ps(a.all, b.all, c.all)};
}
inline Lanes negated_fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {_mm512_fnmadd_ps(a.all, b.all, c.all)};
}
inline Lanes max(const Lanes& a, const Lanes& b) { return {_mm512_max_ps(a.all, b.all)}; }
inline Lanes min(const Lanes& a, const Lanes& b) { return {_mm512_min_ps(a.all, b.all)}; }
inline Lanes within(const Lanes& a, int begin, int end, float otherwise) {
  const __mmask16 keep = static_cast<__mmask16>(before(end) & ~before(begin));
  return {_mm512_mask_blend_ps(keep, _mm512_set1_ps(otherwise), a.all)};
}
inline Lanes times_power(const Lanes& a, const Lanes& power) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(
      _mm512_castps_si512(a.all), _mm512_slli_epi32(_mm512_castps_si512(power.all), 23)))};
}
inline float first(const Lanes& a) { return _mm512_cvtss_f32(a.all); }
inline __m256 upper(__m512 a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}
inline float sum(const Lanes& a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.all), upper(a.all));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float peak(const Lanes& a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.all), upper(a.all));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace
}  // namespace triptych
