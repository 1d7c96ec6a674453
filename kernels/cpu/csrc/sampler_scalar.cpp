#include <cmath>
#include <cstring>

#include "philox.h"
#include "sampler_kernels.h"

namespace triptych {
namespace {

Peak peak_scalar(const float* logits, size_t size) {
  Peak peak{-HUGE_VALF, 0, true};
  for (size_t i = 0; i < size; ++i) {
    peak.valid &= logits[i] < HUGE_VALF;  // false for NaN too
    if (logits[i] > peak.value) {
      peak.value = logits[i];
      peak.id = static_cast<uint32_t>(i);
    }
  }
  return peak;
}

uint64_t mantissa(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & ((uint64_t{1} << 52) - 1);
}

// Every operation rounds once and in this order; the vector files do the same.
uint64_t mass_scalar(float logit, double peak, double inverse_temperature) {
  double exponent = (peak - static_cast<double>(logit)) * inverse_temperature * kLog2E;
  exponent = exponent < 63.0 ? exponent : 63.0;
  const double shifted = exponent + kTwoPow52;  // rounds to an integer, held in the mantissa
  const double fraction = exponent - (shifted - kTwoPow52);
  double power = kExp2Negative[11];
  for (int i = 10; i >= 0; --i) power = power * fraction + kExp2Negative[i];
  return static_cast<uint64_t>(static_cast<int64_t>(power * kTwoPow44)) >> mantissa(shifted);
}

void masses_scalar(const float* logits, double peak, double inverse_temperature, float bin_scale,
                   uint64_t* mass, int32_t* bin) {
  const float top = static_cast<float>(peak);
  for (size_t i = 0; i < kMassBlock; ++i) {
    mass[i] = mass_scalar(logits[i], peak, inverse_temperature);
    const float place = (top - logits[i]) * bin_scale;
    bin[i] = place < kMassBins - 1 ? static_cast<int32_t>(place) : kMassBins - 1;
  }
}

size_t collect_scalar(const float* logits, size_t size, float low, float high, size_t* next,
                      uint32_t* ids, size_t capacity) {
  size_t count = 0, i = *next;
  for (; i < size && count + 16 <= capacity; ++i)
    if (logits[i] >= low && logits[i] < high) ids[count++] = static_cast<uint32_t>(i);
  *next = i;
  return count;
}

// The bound, for a token with high noise word h and n = 2^32 - 1 - h: 1 - u > n / 2^32, so
// Gumbel = -ln(-ln u) <= -ln(1 - u) <= 32 ln 2 - ln n. And log2 n >= 1 + log2(n >> 1) >=
// bits(float(n >> 1)) / 2^23 - 126. A score of `best` is thus out of reach unless
// bits(float(n >> 1)) <= 2^23 * (158 - (distance + best) * log2 e); 0.01 covers float32's rounding.
bool next_candidates_scalar(const NoiseRow& row, float cut, float best, uint32_t* block,
                            uint64_t* mask) {
  const float reach = (158.01f - best * static_cast<float>(kLog2E)) * 8388608.0f;
  for (; row.size - *block >= kNoiseBlock; *block += kNoiseBlock) {
    uint64_t found = 0;
    for (uint32_t quad = 0; quad < kNoiseBlock; quad += 4) {
      const float* logits = row.logits + *block + quad;
      if (logits[0] < cut && logits[1] < cut && logits[2] < cut && logits[3] < cut) continue;
      const PhiloxWords words =
          philox4x32({(*block + quad) >> 2, 0, row.choice, row.position}, row.key[0], row.key[1]);
      for (uint32_t word = 0; word < 4; ++word) {
        const float rest = static_cast<float>(static_cast<int32_t>(~words[word] >> 1));
        int32_t bits;
        std::memcpy(&bits, &rest, sizeof bits);
        const float limit = reach - (row.peak - logits[word]) * row.slope;
        const bool may = static_cast<float>(bits) <= limit && logits[word] >= cut;
        found |= uint64_t{may} << (quad + word);
      }
    }
    if (found) {
      *mask = found;
      return true;
    }
  }
  return false;
}

}  // namespace

const SamplerKernels kSamplerScalar = {peak_scalar, masses_scalar, collect_scalar,
                                       next_candidates_scalar};

}  // namespace triptych
