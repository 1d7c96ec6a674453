// The sampler's kernels, written once on the lanes of an instruction set. Included by one file per
// instruction set, after its lanes_*.h and sampler_lanes_*.h; the rule at the top of lanes_scalar.h
// (internal linkage, C headers only) holds here too.
//
// Numbers that decide come from the same operations, rounded once each and in the same order, in
// every instruction set: there is no fused multiply-add in this file.
#pragma once
#include <math.h>

#include "sampler_kernels.h"

namespace triptych {
namespace {

constexpr size_t kPeakBlock = 1024;

// Whole blocks keep only their maximum; the id is looked up once, in the first block that has it.
Peak row_peak(const float* logits, size_t size) {
  float best = -HUGE_VALF;
  size_t best_start = 0, best_end = 0, start = 0;
  Unordered unordered{};
  for (; start + kPeakBlock <= size; start += kPeakBlock) {
    Lanes peaks[4];
    for (Lanes& each : peaks) each = set1(-HUGE_VALF);
    for (size_t i = start; i < start + kPeakBlock; i += 64) {
      const Lanes a = load(logits + i), b = load(logits + i + 16);
      const Lanes c = load(logits + i + 32), d = load(logits + i + 48);
      unordered.note(a, b);
      unordered.note(c, d);
      peaks[0] = max(peaks[0], a);
      peaks[1] = max(peaks[1], b);
      peaks[2] = max(peaks[2], c);
      peaks[3] = max(peaks[3], d);
    }
    const float block = peak(max(max(peaks[0], peaks[1]), max(peaks[2], peaks[3])));
    if (block > best) {
      best = block;
      best_start = start;
      best_end = start + kPeakBlock;
    }
  }
  bool valid = !unordered.any();
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

void row_masses(const float* logits, double peak, double inverse_temperature, float bin_scale,
                uint64_t* mass, int32_t* bin) {
  const Doubles peaks = set1d(peak), inverse = set1d(inverse_temperature), log2e = set1d(kLog2E);
  const Doubles most = set1d(63.0), two52 = set1d(kTwoPow52), two44 = set1d(kTwoPow44);
  const Lanes top = set1(static_cast<float>(peak)), scale = set1(bin_scale);
  const Lanes last = set1(kMassBins - 1);
  for (size_t i = 0; i < kMassBlock; i += 16) {
    store_truncated(bin + i, min(mul(sub(top, load(logits + i)), scale), last));
    for (size_t k = i; k < i + 16; k += kDoubles) {
      Doubles exponent = mul(mul(sub(peaks, doubles(logits + k)), inverse), log2e);
      exponent = min(exponent, most);
      const Doubles shifted = add(exponent, two52);  // rounds to an integer, held in the mantissa
      const Doubles fraction = sub(exponent, sub(shifted, two52));
      Doubles power = set1d(kExp2Negative[11]);
      for (int term = 10; term >= 0; --term)
        power = add(mul(power, fraction), set1d(kExp2Negative[term]));
      store_shifted(mass + k, mul(power, two44), shifted);
    }
  }
}

size_t row_collect(const float* logits, size_t size, float low, float high, size_t* next,
                   uint32_t* ids, size_t capacity) {
  const Lanes lows = set1(low), highs = set1(high);
  size_t count = 0, i = *next;
  for (; i + 16 <= size && count + 16 <= capacity; i += 16) {
    const Lanes x = load(logits + i);
    const unsigned found = at_least(x, lows) & below(x, highs);
    if (found) count += store_ids(ids + count, static_cast<uint32_t>(i), found);
  }
  for (; i < size && count + 16 <= capacity; ++i)
    if (logits[i] >= low && logits[i] < high) ids[count++] = static_cast<uint32_t>(i);
  *next = i;
  return count;
}

bool none_reaches(const float* logits, const Lanes& cut) {
  static_assert(kNoiseBlock == 64, "four loads");
  const Lanes most =
      max(max(load(logits), load(logits + 16)), max(load(logits + 32), load(logits + 48)));
  return at_least(most, cut) == 0;
}

// The bound, for a token with high noise word h and n = 2^32 - 1 - h: 1 - u > n / 2^32, so
// Gumbel = -ln(-ln u) <= -ln(1 - u) <= 32 ln 2 - ln n. And log2 n >= 1 + log2(n >> 1) >=
// bits(float(n >> 1)) / 2^23 - 126. A score of `best` is thus out of reach unless
// bits(float(n >> 1)) <= 2^23 * (158 - (distance + best) * log2 e); 0.01 covers float32's rounding.
bool row_candidates(const NoiseRow& row, float cut, float best, uint32_t* block, uint64_t* mask) {
  const NoiseKeys keys(row);
  const Lanes top = set1(row.peak), slope = set1(row.slope), cuts = set1(cut);
  const Lanes reach = set1((158.01f - best * static_cast<float>(kLog2E)) * 8388608.0f);
  for (; row.size - *block >= kNoiseBlock; *block += kNoiseBlock) {
    if (none_reaches(row.logits + *block, cuts)) continue;
    uint64_t found = 0;
    for (uint32_t part = 0; part < kNoiseBlock; part += kNoiseIds) {
      Lanes bits[kNoiseIds / 16];
      keys.rest_bits(*block + part, bits);
      for (uint32_t k = 0; k < kNoiseIds / 16; ++k) {
        const Lanes x = load(row.logits + *block + part + 16 * k);
        const Lanes limit = sub(reach, mul(sub(top, x), slope));
        const unsigned may = at_least(limit, bits[k]) & at_least(x, cuts);
        found |= static_cast<uint64_t>(may) << (part + 16 * k);
      }
    }
    if (found) {
      *mask = found;
      return true;
    }
  }
  return false;
}

size_t row_count_above(const float* logits, size_t size, float value) {
  const Lanes values = set1(value);
  size_t count = 0, i = 0;
  for (; i + 16 <= size; i += 16)
    count += static_cast<size_t>(__builtin_popcount(below(values, load(logits + i))));
  for (; i < size; ++i) count += logits[i] > value;
  return count;
}

Spread row_spread(const float* logits, size_t size, double center) {
  constexpr size_t kVectors = 16 / kDoubles;
  const Doubles centers = set1d(center);
  Doubles sums[kVectors], squares[kVectors];
  for (size_t k = 0; k < kVectors; ++k) sums[k] = squares[k] = set1d(0.0);
  float rest[16];
  for (size_t i = 0; i < size; i += 16) {
    const float* from = logits + i;
    if (size - i < 16) {
      for (size_t k = 0; k < 16; ++k) rest[k] = k < size - i ? from[k] : -HUGE_VALF;
      from = rest;
    }
    for (size_t k = 0; k < kVectors; ++k) {
      const Doubles x = doubles(from + k * kDoubles);
      const Doubles distance = where_finite(x, sub(centers, x));
      sums[k] = add(sums[k], distance);
      squares[k] = add(squares[k], mul(distance, distance));
    }
  }
  double lanes[2][16];
  for (size_t k = 0; k < kVectors; ++k) {
    store(lanes[0] + k * kDoubles, sums[k]);
    store(lanes[1] + k * kDoubles, squares[k]);
  }
  Spread total{0.0, 0.0};
  for (size_t i = 0; i < 16; ++i) {
    total.sum += lanes[0][i];
    total.squares += lanes[1][i];
  }
  return total;
}

constexpr SamplerKernels kSampler = {row_peak,       row_masses,      row_collect,
                                     row_candidates, row_count_above, row_spread};

}  // namespace
}  // namespace triptych
