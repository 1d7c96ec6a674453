// The sampler's part of the AVX-512 lanes; included after lanes_avx512.h. The meaning of each
// function is sampler_lanes_scalar.h's, and so are its bits.
#pragma once
#include "sampler_kernels.h"

namespace triptych {
namespace {

struct Unordered {
  __mmask16 found = 0;

  void note(const Lanes& a, const Lanes& b) {
    found = static_cast<__mmask16>(found | _mm512_cmp_ps_mask(a.all, b.all, _CMP_UNORD_Q));
  }
  bool any() const { return found != 0; }
};

inline unsigned at_least(const Lanes& a, const Lanes& b) {
  return _mm512_cmp_ps_mask(a.all, b.all, _CMP_GE_OQ);
}
inline unsigned below(const Lanes& a, const Lanes& b) {
  return _mm512_cmp_ps_mask(a.all, b.all, _CMP_LT_OQ);
}
inline size_t store_ids(uint32_t* to, uint32_t first, unsigned found) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i ids = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first)));
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(found), ids));
  return static_cast<size_t>(__builtin_popcount(found));
}
inline void store_truncated(int32_t* to, const Lanes& a) {
  _mm512_storeu_si512(to, _mm512_cvttps_epi32(a.all));
}

constexpr size_t kDoubles = 8;

struct Doubles {
  __m512d all;
};

inline Doubles set1d(double x) { return {_mm512_set1_pd(x)}; }
inline Doubles doubles(const float* from) { return {_mm512_cvtps_pd(_mm256_loadu_ps(from))}; }
inline void store(double* to, const Doubles& a) { _mm512_storeu_pd(to, a.all); }
inline Doubles add(const Doubles& a, const Doubles& b) { return {_mm512_add_pd(a.all, b.all)}; }
inline Doubles sub(const Doubles& a, const Doubles& b) { return {_mm512_sub_pd(a.all, b.all)}; }
inline Doubles mul(const Doubles& a, const Doubles& b) { return {_mm512_mul_pd(a.all, b.all)}; }
inline Doubles min(const Doubles& a, const Doubles& b) { return {_mm512_min_pd(a.all, b.all)}; }
inline Doubles where_finite(const Doubles& x, const Doubles& a) {
  const __m512d lowest = _mm512_set1_pd(-__builtin_inf());
  return {_mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x.all, lowest, _CMP_GT_OQ), a.all)};
}
inline void store_shifted(uint64_t* to, const Doubles& a, const Doubles& shift) {
  const __m512i mantissa = _mm512_set1_epi64((1LL << 52) - 1);
  const __m512d whole = _mm512_add_pd(_mm512_floor_pd(a.all), _mm512_set1_pd(kTwoPow52));
  const __m512i integer = _mm512_and_si512(_mm512_castpd_si512(whole), mantissa);
  const __m512i places = _mm512_and_si512(_mm512_castpd_si512(shift.all), mantissa);
  _mm512_storeu_si512(to, _mm512_srlv_epi64(integer, places));
}

constexpr uint32_t kNoiseIds = 32;

class NoiseKeys {
 public:
  explicit NoiseKeys(const NoiseRow& row)
      : choice_(_mm512_set1_epi64(row.choice)), position_(_mm512_set1_epi64(row.position)) {
    for (uint32_t round = 0; round < 10; ++round) {
      first_[round] = _mm512_set1_epi64(row.key[0] + round * kPhiloxWeyl0);
      second_[round] = _mm512_set1_epi64(row.key[1] + round * kPhiloxWeyl1);
    }
  }

  void rest_bits(uint32_t id, Lanes* out) const {
    const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i words[4];
    philox(_mm512_add_epi64(_mm512_set1_epi64(id >> 2), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)),
           words);
    const __m512i w01 = _mm512_mask_blend_epi32(0xAAAA, words[0], _mm512_slli_epi64(words[1], 32));
    const __m512i w23 = _mm512_mask_blend_epi32(0xAAAA, words[2], _mm512_slli_epi64(words[3], 32));
    const __m512i even = _mm512_unpacklo_epi64(w01, w23);  // ids 0-3, 8-11, 16-19, 24-27
    const __m512i odd = _mm512_unpackhi_epi64(w01, w23);   // ids 4-7, 12-15, 20-23, 28-31
    out[0] = rest_bits(_mm512_permutex2var_epi64(even, first_half, odd));
    out[1] = rest_bits(_mm512_permutex2var_epi64(even, second_half, odd));
  }

 private:
  // As in sampler_lanes_avx2.h, on eight counters.
  void philox(__m512i w0, __m512i* out) const {
    const __m512i multiplier0 = _mm512_set1_epi64(kPhiloxMultiplier0);
    const __m512i multiplier1 = _mm512_set1_epi64(kPhiloxMultiplier1);
    __m512i w1 = _mm512_setzero_si512(), w2 = choice_, w3 = position_;
    for (int round = 0; round < 10; ++round) {
      const __m512i product0 = _mm512_mul_epu32(w0, multiplier0);
      const __m512i product1 = _mm512_mul_epu32(w2, multiplier1);
      w0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), w1, first_[round], 0x96);
      w2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), w3, second_[round], 0x96);
      w1 = product1;
      w3 = product0;
    }
    out[0] = w0;
    out[1] = w1;
    out[2] = w2;
    out[3] = w3;
  }

  static Lanes rest_bits(__m512i words) {
    const __m512i rest = _mm512_srli_epi32(_mm512_xor_si512(words, _mm512_set1_epi32(-1)), 1);
    return {_mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepi32_ps(rest)))};
  }

  __m512i first_[10], second_[10], choice_, position_;
};

}  // namespace
}  // namespace triptych
