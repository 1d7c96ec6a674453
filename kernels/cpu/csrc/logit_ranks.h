// The order of a row's ids: by logit, largest first; equal logits by id, lowest first.
// What the filters keep is an interval of this order, described by its two ends.
#pragma once
#include <cfloat>
#include <cstdint>
#include <cstring>

namespace triptych {

// Larger means earlier in the order. -0 ranks as +0; no NaN.
using Rank = uint64_t;

inline uint32_t order_bits(float logit) {
  logit += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof bits);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

inline float logit_of_order_bits(uint32_t order) {
  const uint32_t bits = order ^ (order >> 31 ? 0x80000000u : 0xFFFFFFFFu);
  float logit;
  std::memcpy(&logit, &bits, sizeof logit);
  return logit;
}

inline Rank rank_of(float logit, uint32_t id) {
  return Rank{order_bits(logit)} << 32 | static_cast<uint32_t>(~id);
}
inline uint32_t id_of(Rank rank) { return ~static_cast<uint32_t>(rank); }
inline float logit_of(Rank rank) { return logit_of_order_bits(static_cast<uint32_t>(rank >> 32)); }

// The lowest logit under the peak for which `holds`, which is true at the peak and monotone in the
// logit. Bisection over the floats in their order: 32 steps, whatever their spacing.
template <typename Predicate>
float lowest_logit(float peak, const Predicate& holds) {
  uint32_t low = order_bits(-FLT_MAX), high = order_bits(peak);
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (holds(logit_of_order_bits(middle)))
      high = middle;
    else
      low = middle + 1;
  }
  return logit_of_order_bits(high);
}

// The last rank of a kept prefix that holds every finite logit; -inf ranks behind it.
inline Rank last_finite_rank() { return Rank{order_bits(-FLT_MAX)} << 32; }

}  // namespace triptych
