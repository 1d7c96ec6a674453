// The sampler's part of the AVX2 lanes; included after lanes_avx2.h. The meaning of each function
// is sampler_lanes_scalar.h's, and so are its bits.
#pragma once
#include "sampler_kernels.h"

namespace triptych {
namespace {

struct Unordered {
  __m256 found = _mm256_setzero_ps();

  void note(const Lanes& a, const Lanes& b) {
    found = _mm256_or_ps(found, _mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q));
    found = _mm256_or_ps(found, _mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q));
  }
  bool any() const { return _mm256_movemask_ps(found) != 0; }
};

template <int kRelation>
inline unsigned compare(const Lanes& a, const Lanes& b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, kRelation));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, kRelation));
  return static_cast<unsigned>(low) | static_cast<unsigned>(high) << 8;
}
inline unsigned at_least(const Lanes& a, const Lanes& b) { return compare<_CMP_GE_OQ>(a, b); }
inline unsigned below(const Lanes& a, const Lanes& b) { return compare<_CMP_LT_OQ>(a, b); }
inline size_t store_ids(uint32_t* to, uint32_t first, unsigned found) {
  size_t count = 0;
  for (; found; found &= found - 1)
    to[count++] = first + static_cast<uint32_t>(__builtin_ctz(found));
  return count;
}
inline void store_truncated(int32_t* to, const Lanes& a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_cvttps_epi32(a.low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm256_cvttps_epi32(a.high));
}

constexpr size_t kDoubles = 4;

struct Doubles {
  __m256d all;
};

inline Doubles set1d(double x) { return {_mm256_set1_pd(x)}; }
inline Doubles doubles(const float* from) { return {_mm256_cvtps_pd(_mm_loadu_ps(from))}; }
inline void store(double* to, const Doubles& a) { _mm256_storeu_pd(to, a.all); }
inline Doubles add(const Doubles& a, const Doubles& b) { return {_mm256_add_pd(a.all, b.all)}; }
inline Doubles sub(const Doubles& a, const Doubles& b) { return {_mm256_sub_pd(a.all, b.all)}; }
inline Doubles mul(const Doubles& a, const Doubles& b) { return {_mm256_mul_pd(a.all, b.all)}; }
inline Doubles min(const Doubles& a, const Doubles& b) { return {_mm256_min_pd(a.all, b.all)}; }
inline Doubles where_finite(const Doubles& x, const Doubles& a) {
  const __m256d lowest = _mm256_set1_pd(-__builtin_inf());
  return {_mm256_and_pd(_mm256_cmp_pd(x.all, lowest, _CMP_GT_OQ), a.all)};
}
inline void store_shifted(uint64_t* to, const Doubles& a, const Doubles& shift) {
  const __m256i mantissa = _mm256_set1_epi64x((1LL << 52) - 1);
  const __m256d whole = _mm256_add_pd(_mm256_floor_pd(a.all), _mm256_set1_pd(kTwoPow52));
  const __m256i integer = _mm256_and_si256(_mm256_castpd_si256(whole), mantissa);
  const __m256i places = _mm256_and_si256(_mm256_castpd_si256(shift.all), mantissa);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_srlv_epi64(integer, places));
}

constexpr uint32_t kNoiseIds = 16;

class NoiseKeys {
 public:
  explicit NoiseKeys(const NoiseRow& row)
      : choice_(_mm256_set1_epi64x(row.choice)), position_(_mm256_set1_epi64x(row.position)) {
    for (uint32_t round = 0; round < 10; ++round) {
      first_[round] = _mm256_set1_epi64x(row.key[0] + round * kPhiloxWeyl0);
      second_[round] = _mm256_set1_epi64x(row.key[1] + round * kPhiloxWeyl1);
    }
  }

  void rest_bits(uint32_t id, Lanes* out) const {
    __m256i words[4];
    philox(_mm256_add_epi64(_mm256_set1_epi64x(id >> 2), _mm256_setr_epi64x(0, 1, 2, 3)), words);
    const __m256i w01 = _mm256_blend_epi32(words[0], _mm256_slli_epi64(words[1], 32), 0xAA);
    const __m256i w23 = _mm256_blend_epi32(words[2], _mm256_slli_epi64(words[3], 32), 0xAA);
    const __m256i even = _mm256_unpacklo_epi64(w01, w23);  // ids 0-3, 8-11
    const __m256i odd = _mm256_unpackhi_epi64(w01, w23);   // ids 4-7, 12-15
    *out = {rest_bits(_mm256_permute2x128_si256(even, odd, 0x20)),
            rest_bits(_mm256_permute2x128_si256(even, odd, 0x31))};
  }

 private:
  // Four counters, each word in the low half of a 64-bit lane: the product needs no unpacking, and
  // what gathers in the high halves is ignored by the next product.
  void philox(__m256i w0, __m256i* out) const {
    const __m256i multiplier0 = _mm256_set1_epi64x(kPhiloxMultiplier0);
    const __m256i multiplier1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
    __m256i w1 = _mm256_setzero_si256(), w2 = choice_, w3 = position_;
    for (int round = 0; round < 10; ++round) {
      const __m256i product0 = _mm256_mul_epu32(w0, multiplier0);
      const __m256i product1 = _mm256_mul_epu32(w2, multiplier1);
      w0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), w1), first_[round]);
      w2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), w3), second_[round]);
      w1 = product1;
      w3 = product0;
    }
    out[0] = w0;
    out[1] = w1;
    out[2] = w2;
    out[3] = w3;
  }

  static __m256 rest_bits(__m256i words) {
    const __m256i rest = _mm256_srli_epi32(_mm256_xor_si256(words, _mm256_set1_epi32(-1)), 1);
    return _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_cvtepi32_ps(rest)));
  }

  __m256i first_[10], second_[10], choice_, position_;
};

}  // namespace
}  // namespace triptych
