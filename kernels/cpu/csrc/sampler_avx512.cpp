// Compiled with AVX-512 F, BW and VL flags; the rule at the top of sampler_avx2.cpp holds here too.
#include <immintrin.h>
#include <math.h>

#include "sampler_kernels.h"

namespace triptych {
namespace {

constexpr size_t kPeakBlock = 1024;

Peak peak_avx512(const float* logits, size_t size) {
  float best = -HUGE_VALF;
  size_t best_start = 0, best_end = 0, start = 0;
  __mmask16 unordered = 0;
  for (; start + kPeakBlock <= size; start += kPeakBlock) {
    __m512 peaks[4];
    for (__m512& peak : peaks) peak = _mm512_set1_ps(-HUGE_VALF);
    for (size_t i = start; i < start + kPeakBlock; i += 64) {
      const __m512 a = _mm512_loadu_ps(logits + i), b = _mm512_loadu_ps(logits + i + 16);
      const __m512 c = _mm512_loadu_ps(logits + i + 32), d = _mm512_loadu_ps(logits + i + 48);
      unordered |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(c, d, _CMP_UNORD_Q);
      peaks[0] = _mm512_max_ps(peaks[0], a);
      peaks[1] = _mm512_max_ps(peaks[1], b);
      peaks[2] = _mm512_max_ps(peaks[2], c);
      peaks[3] = _mm512_max_ps(peaks[3], d);
    }
    const float peak = _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_max_ps(peaks[0], peaks[1]), _mm512_max_ps(peaks[2], peaks[3])));
    if (peak > best) {
      best = peak;
      best_start = start;
      best_end = start + kPeakBlock;
    }
  }
  bool valid = unordered == 0;
  size_t id = best_start;
  while (id < best_end && logits[id] != best) ++id;
  for (; start < size; ++start) {
    valid &= logits[start] == logits[start];  // isnan is an inline function
    if (logits[start] > best) {
      best = logits[start];
      id = start;
    }
  }
  return {best, static_cast<uint32_t>(id), valid && best < HUGE_VALF};
}

__m512i masses8(__m256 logits, __m512d peak, __m512d inverse_temperature) {
  const __m512i mantissa = _mm512_set1_epi64((1LL << 52) - 1);
  const __m512d two52 = _mm512_set1_pd(kTwoPow52);
  __m512d exponent =
      _mm512_mul_pd(_mm512_sub_pd(peak, _mm512_cvtps_pd(logits)), inverse_temperature);
  exponent = _mm512_mul_pd(exponent, _mm512_set1_pd(kLog2E));
  exponent = _mm512_min_pd(exponent, _mm512_set1_pd(63.0));
  const __m512d shifted = _mm512_add_pd(exponent, two52);
  const __m512d fraction = _mm512_sub_pd(exponent, _mm512_sub_pd(shifted, two52));
  __m512d power = _mm512_set1_pd(kExp2Negative[11]);
  for (int i = 10; i >= 0; --i)
    power = _mm512_add_pd(_mm512_mul_pd(power, fraction), _mm512_set1_pd(kExp2Negative[i]));
  power = _mm512_floor_pd(_mm512_mul_pd(power, _mm512_set1_pd(kTwoPow44)));
  const __m512i whole =
      _mm512_and_si512(_mm512_castpd_si512(_mm512_add_pd(power, two52)), mantissa);
  return _mm512_srlv_epi64(whole, _mm512_and_si512(_mm512_castpd_si512(shifted), mantissa));
}

void masses_avx512(const float* logits, double peak, double inverse_temperature, float bin_scale,
                   uint64_t* mass, int32_t* bin) {
  const __m512d peaks = _mm512_set1_pd(peak), inverse = _mm512_set1_pd(inverse_temperature);
  const __m256 top = _mm256_set1_ps(static_cast<float>(peak)), scale = _mm256_set1_ps(bin_scale);
  const __m256 last = _mm256_set1_ps(kMassBins - 1);
  for (size_t i = 0; i < kMassBlock; i += 8) {
    const __m256 x = _mm256_loadu_ps(logits + i);
    const __m256 place = _mm256_min_ps(_mm256_mul_ps(_mm256_sub_ps(top, x), scale), last);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bin + i), _mm256_cvttps_epi32(place));
    _mm512_storeu_si512(mass + i, masses8(x, peaks, inverse));
  }
}

size_t collect_avx512(const float* logits, size_t size, float low, float high, size_t* next,
                      uint32_t* ids, size_t capacity) {
  const __m512 lows = _mm512_set1_ps(low), highs = _mm512_set1_ps(high);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  size_t count = 0, i = *next;
  for (; i < size && count + 16 <= capacity; i += 16) {
    const __mmask16 live = size - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (size - i)) - 1);
    const __m512 x = _mm512_maskz_loadu_ps(live, logits + i);
    const __mmask16 found = _mm512_mask_cmp_ps_mask(
        _mm512_mask_cmp_ps_mask(live, x, lows, _CMP_GE_OQ), x, highs, _CMP_LT_OQ);
    if (!found) continue;
    const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(found, places));
    count += static_cast<size_t>(__builtin_popcount(found));
  }
  *next = i < size ? i : size;
  return count;
}

struct RoundKeys {
  __m512i first[10], second[10];
};

// As in sampler_avx2.cpp, on eight counters.
struct Words {
  __m512i word[4];
};

Words philox8(__m512i counter, __m512i choice, __m512i position, const RoundKeys& keys) {
  const __m512i multiplier0 = _mm512_set1_epi64(kPhiloxMultiplier0);
  const __m512i multiplier1 = _mm512_set1_epi64(kPhiloxMultiplier1);
  __m512i w0 = counter, w1 = _mm512_setzero_si512(), w2 = choice, w3 = position;
  for (int round = 0; round < 10; ++round) {
    const __m512i product0 = _mm512_mul_epu32(w0, multiplier0);
    const __m512i product1 = _mm512_mul_epu32(w2, multiplier1);
    w0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), w1, keys.first[round], 0x96);
    w2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), w3, keys.second[round], 0x96);
    w1 = product1;
    w3 = product0;
  }
  return {{w0, w1, w2, w3}};
}

// The bound is derived in sampler_scalar.cpp.
__mmask16 candidates16(const float* logits, __m512i words, __m512 peak, __m512 slope, __m512 reach,
                       __m512 cut) {
  const __m512i rest = _mm512_srli_epi32(_mm512_xor_si512(words, _mm512_set1_epi32(-1)), 1);
  const __m512 bits = _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepi32_ps(rest)));
  const __m512 x = _mm512_loadu_ps(logits);
  const __m512 limit = _mm512_sub_ps(reach, _mm512_mul_ps(_mm512_sub_ps(peak, x), slope));
  return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(bits, limit, _CMP_LE_OQ), x, cut, _CMP_GE_OQ);
}

bool none_reaches(const float* logits, __m512 cut) {
  const __m512 peak =
      _mm512_max_ps(_mm512_max_ps(_mm512_loadu_ps(logits), _mm512_loadu_ps(logits + 16)),
                    _mm512_max_ps(_mm512_loadu_ps(logits + 32), _mm512_loadu_ps(logits + 48)));
  return _mm512_cmp_ps_mask(peak, cut, _CMP_GE_OQ) == 0;
}

bool next_candidates_avx512(const NoiseRow& row, float cut, float best, uint32_t* block,
                            uint64_t* mask) {
  RoundKeys keys;
  for (uint32_t round = 0; round < 10; ++round) {
    keys.first[round] = _mm512_set1_epi64(row.key[0] + round * kPhiloxWeyl0);
    keys.second[round] = _mm512_set1_epi64(row.key[1] + round * kPhiloxWeyl1);
  }
  const __m512i choice = _mm512_set1_epi64(row.choice);
  const __m512i position = _mm512_set1_epi64(row.position);
  const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512 peak = _mm512_set1_ps(row.peak), slope = _mm512_set1_ps(row.slope);
  const __m512 cuts = _mm512_set1_ps(cut);
  const __m512 reach = _mm512_set1_ps((158.01f - best * static_cast<float>(kLog2E)) * 8388608.0f);
  for (; row.size - *block >= kNoiseBlock; *block += kNoiseBlock) {
    if (none_reaches(row.logits + *block, cuts)) continue;
    uint64_t found = 0;
    for (uint32_t part = 0; part < kNoiseBlock; part += 32) {
      const uint32_t id = *block + part;
      const __m512i counter =
          _mm512_add_epi64(_mm512_set1_epi64(id >> 2), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
      const Words words = philox8(counter, choice, position, keys);
      const __m512i w01 =
          _mm512_mask_blend_epi32(0xAAAA, words.word[0], _mm512_slli_epi64(words.word[1], 32));
      const __m512i w23 =
          _mm512_mask_blend_epi32(0xAAAA, words.word[2], _mm512_slli_epi64(words.word[3], 32));
      const __m512i even = _mm512_unpacklo_epi64(w01, w23);  // ids 0-3, 8-11, 16-19, 24-27
      const __m512i odd = _mm512_unpackhi_epi64(w01, w23);   // ids 4-7, 12-15, 20-23, 28-31
      const __mmask16 low =
          candidates16(row.logits + id, _mm512_permutex2var_epi64(even, first_half, odd), peak,
                       slope, reach, cuts);
      const __mmask16 high =
          candidates16(row.logits + id + 16, _mm512_permutex2var_epi64(even, second_half, odd),
                       peak, slope, reach, cuts);
      found |= (static_cast<uint64_t>(low) | static_cast<uint64_t>(high) << 16) << part;
    }
    if (found) {
      *mask = found;
      return true;
    }
  }
  return false;
}

}  // namespace

const SamplerKernels kSamplerAvx512 = {peak_avx512, masses_avx512, collect_avx512,
                                       next_candidates_avx512};

}  // namespace triptych
