// Compiled with -mavx2 -mfma. Include no header that defines inline functions of ours or of the
// standard library: the linker may keep this file's copy of them for every caller.
#include <immintrin.h>
#include <math.h>

#include "sampler_kernels.h"

namespace triptych {
namespace {

constexpr size_t kPeakBlock = 1024;

float largest(__m256 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  half = _mm_max_ss(half, _mm_movehdup_ps(half));
  return _mm_cvtss_f32(half);
}

// Whole blocks keep only their maximum; the id is looked up once, in the first block that has it.
Peak peak_avx2(const float* logits, size_t size) {
  float best = -HUGE_VALF;
  size_t best_start = 0, best_end = 0, start = 0;
  __m256 unordered = _mm256_setzero_ps();
  for (; start + kPeakBlock <= size; start += kPeakBlock) {
    __m256 peaks[4];
    for (__m256& peak : peaks) peak = _mm256_set1_ps(-HUGE_VALF);
    for (size_t i = start; i < start + kPeakBlock; i += 32) {
      const __m256 a = _mm256_loadu_ps(logits + i), b = _mm256_loadu_ps(logits + i + 8);
      const __m256 c = _mm256_loadu_ps(logits + i + 16), d = _mm256_loadu_ps(logits + i + 24);
      unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
      unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(c, d, _CMP_UNORD_Q));
      peaks[0] = _mm256_max_ps(peaks[0], a);
      peaks[1] = _mm256_max_ps(peaks[1], b);
      peaks[2] = _mm256_max_ps(peaks[2], c);
      peaks[3] = _mm256_max_ps(peaks[3], d);
    }
    const float peak = largest(
        _mm256_max_ps(_mm256_max_ps(peaks[0], peaks[1]), _mm256_max_ps(peaks[2], peaks[3])));
    if (peak > best) {
      best = peak;
      best_start = start;
      best_end = start + kPeakBlock;
    }
  }
  bool valid = _mm256_movemask_ps(unordered) == 0;
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

__m256i masses4(__m128 logits, __m256d peak, __m256d inverse_temperature) {
  const __m256i mantissa = _mm256_set1_epi64x((1LL << 52) - 1);
  const __m256d two52 = _mm256_set1_pd(kTwoPow52);
  __m256d exponent =
      _mm256_mul_pd(_mm256_sub_pd(peak, _mm256_cvtps_pd(logits)), inverse_temperature);
  exponent = _mm256_mul_pd(exponent, _mm256_set1_pd(kLog2E));
  exponent = _mm256_min_pd(exponent, _mm256_set1_pd(63.0));
  const __m256d shifted = _mm256_add_pd(exponent, two52);
  const __m256d fraction = _mm256_sub_pd(exponent, _mm256_sub_pd(shifted, two52));
  __m256d power = _mm256_set1_pd(kExp2Negative[11]);
  for (int i = 10; i >= 0; --i)
    power = _mm256_add_pd(_mm256_mul_pd(power, fraction), _mm256_set1_pd(kExp2Negative[i]));
  power = _mm256_floor_pd(_mm256_mul_pd(power, _mm256_set1_pd(kTwoPow44)));
  const __m256i whole =
      _mm256_and_si256(_mm256_castpd_si256(_mm256_add_pd(power, two52)), mantissa);
  return _mm256_srlv_epi64(whole, _mm256_and_si256(_mm256_castpd_si256(shifted), mantissa));
}

void masses_avx2(const float* logits, double peak, double inverse_temperature, float bin_scale,
                 uint64_t* mass, int32_t* bin) {
  const __m256d peaks = _mm256_set1_pd(peak), inverse = _mm256_set1_pd(inverse_temperature);
  const __m256 top = _mm256_set1_ps(static_cast<float>(peak)), scale = _mm256_set1_ps(bin_scale);
  const __m256 last = _mm256_set1_ps(kMassBins - 1);
  for (size_t i = 0; i < kMassBlock; i += 8) {
    const __m256 x = _mm256_loadu_ps(logits + i);
    const __m256 place = _mm256_min_ps(_mm256_mul_ps(_mm256_sub_ps(top, x), scale), last);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bin + i), _mm256_cvttps_epi32(place));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(mass + i),
                        masses4(_mm256_castps256_ps128(x), peaks, inverse));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(mass + i + 4),
                        masses4(_mm256_extractf128_ps(x, 1), peaks, inverse));
  }
}

size_t collect_avx2(const float* logits, size_t size, float low, float high, size_t* next,
                    uint32_t* ids, size_t capacity) {
  const __m256 lows = _mm256_set1_ps(low), highs = _mm256_set1_ps(high);
  size_t count = 0, i = *next;
  for (; i + 16 <= size && count + 16 <= capacity; i += 16) {
    const __m256 a = _mm256_loadu_ps(logits + i), b = _mm256_loadu_ps(logits + i + 8);
    const __m256 in_a =
        _mm256_and_ps(_mm256_cmp_ps(a, lows, _CMP_GE_OQ), _mm256_cmp_ps(a, highs, _CMP_LT_OQ));
    const __m256 in_b =
        _mm256_and_ps(_mm256_cmp_ps(b, lows, _CMP_GE_OQ), _mm256_cmp_ps(b, highs, _CMP_LT_OQ));
    unsigned found = static_cast<unsigned>(_mm256_movemask_ps(in_a)) |
                     static_cast<unsigned>(_mm256_movemask_ps(in_b)) << 8;
    for (; found; found &= found - 1)
      ids[count++] = static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(found));
  }
  for (; i < size && count + 16 <= capacity; ++i)
    if (logits[i] >= low && logits[i] < high) ids[count++] = static_cast<uint32_t>(i);
  *next = i;
  return count;
}

struct RoundKeys {
  __m256i first[10], second[10];
};

// Philox on four counters, each word in the low half of a 64-bit lane: the product needs no
// unpacking, and what gathers in the high halves is ignored by the next product.
struct Words {
  __m256i word[4];
};

Words philox4(__m256i counter, __m256i choice, __m256i position, const RoundKeys& keys) {
  const __m256i multiplier0 = _mm256_set1_epi64x(kPhiloxMultiplier0);
  const __m256i multiplier1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
  __m256i w0 = counter, w1 = _mm256_setzero_si256(), w2 = choice, w3 = position;
  for (int round = 0; round < 10; ++round) {
    const __m256i product0 = _mm256_mul_epu32(w0, multiplier0);
    const __m256i product1 = _mm256_mul_epu32(w2, multiplier1);
    w0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), w1), keys.first[round]);
    w2 =
        _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), w3), keys.second[round]);
    w1 = product1;
    w3 = product0;
  }
  return {{w0, w1, w2, w3}};
}

// The bound is derived in sampler_scalar.cpp.
unsigned candidates8(const float* logits, __m256i words, __m256 peak, __m256 slope, __m256 reach,
                     __m256 cut) {
  const __m256i rest = _mm256_srli_epi32(_mm256_xor_si256(words, _mm256_set1_epi32(-1)), 1);
  const __m256 bits = _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_cvtepi32_ps(rest)));
  const __m256 x = _mm256_loadu_ps(logits);
  const __m256 limit = _mm256_sub_ps(reach, _mm256_mul_ps(_mm256_sub_ps(peak, x), slope));
  const __m256 may =
      _mm256_and_ps(_mm256_cmp_ps(bits, limit, _CMP_LE_OQ), _mm256_cmp_ps(x, cut, _CMP_GE_OQ));
  return static_cast<unsigned>(_mm256_movemask_ps(may));
}

bool none_reaches(const float* logits, __m256 cut) {
  __m256 peak = _mm256_loadu_ps(logits);
  for (uint32_t i = 8; i < kNoiseBlock; i += 8)
    peak = _mm256_max_ps(peak, _mm256_loadu_ps(logits + i));
  return _mm256_movemask_ps(_mm256_cmp_ps(peak, cut, _CMP_GE_OQ)) == 0;
}

bool next_candidates_avx2(const NoiseRow& row, float cut, float best, uint32_t* block,
                          uint64_t* mask) {
  RoundKeys keys;
  for (uint32_t round = 0; round < 10; ++round) {
    keys.first[round] = _mm256_set1_epi64x(row.key[0] + round * kPhiloxWeyl0);
    keys.second[round] = _mm256_set1_epi64x(row.key[1] + round * kPhiloxWeyl1);
  }
  const __m256i choice = _mm256_set1_epi64x(row.choice);
  const __m256i position = _mm256_set1_epi64x(row.position);
  const __m256 peak = _mm256_set1_ps(row.peak), slope = _mm256_set1_ps(row.slope);
  const __m256 cuts = _mm256_set1_ps(cut);
  const __m256 reach = _mm256_set1_ps((158.01f - best * static_cast<float>(kLog2E)) * 8388608.0f);
  for (; row.size - *block >= kNoiseBlock; *block += kNoiseBlock) {
    if (none_reaches(row.logits + *block, cuts)) continue;
    uint64_t found = 0;
    for (uint32_t part = 0; part < kNoiseBlock; part += 16) {
      const uint32_t id = *block + part;
      const __m256i counter =
          _mm256_add_epi64(_mm256_set1_epi64x(id >> 2), _mm256_setr_epi64x(0, 1, 2, 3));
      const Words words = philox4(counter, choice, position, keys);
      const __m256i w01 =
          _mm256_blend_epi32(words.word[0], _mm256_slli_epi64(words.word[1], 32), 0xAA);
      const __m256i w23 =
          _mm256_blend_epi32(words.word[2], _mm256_slli_epi64(words.word[3], 32), 0xAA);
      const __m256i even = _mm256_unpacklo_epi64(w01, w23);  // ids 0-3, 8-11
      const __m256i odd = _mm256_unpackhi_epi64(w01, w23);   // ids 4-7, 12-15
      const unsigned low = candidates8(row.logits + id, _mm256_permute2x128_si256(even, odd, 0x20),
                                       peak, slope, reach, cuts);
      const unsigned high =
          candidates8(row.logits + id + 8, _mm256_permute2x128_si256(even, odd, 0x31), peak, slope,
                      reach, cuts);
      found |= static_cast<uint64_t>(low | high << 8) << part;
    }
    if (found) {
      *mask = found;
      return true;
    }
  }
  return false;
}

}  // namespace

const SamplerKernels kSamplerAvx2 = {peak_avx2, masses_avx2, collect_avx2, next_candidates_avx2};

}  // namespace triptych
