#include "gumbel_draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "philox.h"

namespace triptych {
namespace {

constexpr double kLargestGumbel = 37.0;  // -ln(-ln(1 - 2^-53)) = 36.74, rounded up

// Part 0 or 1 of an id's noise.
uint32_t noise_word(uint32_t id, uint32_t part, const Noise& noise) {
  const auto key0 = static_cast<uint32_t>(noise.seed);
  const auto key1 = static_cast<uint32_t>(noise.seed >> 32);
  return philox4x32({id >> 2, part, noise.choice, noise.position}, key0, key1)[id & 3];
}

double gumbel(uint32_t id, uint64_t high, const Noise& noise) {
  const uint64_t low = noise_word(id, 1, noise);
  const uint64_t odd = (high << 20 | low >> 12) << 1 | 1;
  return -std::log(-std::log(static_cast<double>(odd) * 0x1p-53));
}

double gumbel(uint32_t id, const Noise& noise) {
  return gumbel(id, noise_word(id, 0, noise), noise);
}

// Whether an id with this high word may have noise of `wanted` or more: sampler_body.h has the
// derivation. Saves the logarithms of those that may not.
bool may_reach(uint32_t high, double wanted) {
  const auto rest = static_cast<float>(static_cast<int32_t>(~high >> 1));
  int32_t bits;
  std::memcpy(&bits, &rest, sizeof bits);
  return bits <= (158.01 - wanted * kLog2E) * 8388608.0;
}

// The best-scoring id among those offered; the lowest of equals.
struct Winner {
  uint32_t id;
  double score;

  bool offer(uint32_t candidate, double candidate_score) {
    if (candidate_score < score || (candidate_score == score && candidate > id)) return false;
    id = candidate;
    score = candidate_score;
    return true;
  }
};

Winner first_of(const Row& row, const Kept& kept, const Noise& noise) {
  const uint32_t id = id_of(kept.first);
  return {id, gumbel(id, noise) - row.distance(logit_of(kept.first))};
}

// The logit under which no noise can make up for the distance.
float lowest_useful_logit(const Row& row, double score) {
  const double low = row.peak.value - (kLargestGumbel - score) / row.inverse_temperature;
  const auto rounded = static_cast<float>(std::max(low, double{-FLT_MAX}));
  return std::max(std::nextafter(rounded, -HUGE_VALF), -FLT_MAX);
}

int32_t draw_from_list(const Row& row, const Kept& kept, const Noise& noise,
                       const std::vector<Rank>& ranks) {
  Winner winner = first_of(row, kept, noise);
  for (const Rank rank : ranks) {
    const uint32_t id = id_of(rank), high = noise_word(id, 0, noise);
    const double distance = row.distance(logit_of(rank));
    if (may_reach(high, distance + winner.score))
      winner.offer(id, gumbel(id, high, noise) - distance);
  }
  return static_cast<int32_t>(winner.id);
}

// The kernels skip what certainly loses; every id that they leave is scored here, in float64.
int32_t draw_from_row(const Row& row, const Kept& kept, const Noise& noise,
                      const SamplerKernels& kernels) {
  const double slope = std::min(row.inverse_temperature, 1e30) * kLog2E * 8388608.0;
  const NoiseRow search{
      row.logits,
      row.size,
      row.peak.value,
      static_cast<float>(slope),
      {static_cast<uint32_t>(noise.seed), static_cast<uint32_t>(noise.seed >> 32)},
      noise.choice,
      noise.position};
  const float last_kept = logit_of(kept.last);
  Winner winner = first_of(row, kept, noise);
  float cut = std::max(last_kept, lowest_useful_logit(row, winner.score));
  const auto offer = [&](uint32_t id) {
    const float logit = row.logits[id];
    if (logit < cut) return;
    const Rank rank = rank_of(logit, id);
    if (rank < kept.last || rank > kept.first) return;
    if (winner.offer(id, gumbel(id, noise) - row.distance(logit)))
      cut = std::max(last_kept, lowest_useful_logit(row, winner.score));
  };
  uint32_t block = 0;
  uint64_t mask = 0;
  while (kernels.next_candidates(search, cut, static_cast<float>(winner.score), &block, &mask)) {
    for (; mask; mask &= mask - 1) offer(block + static_cast<uint32_t>(__builtin_ctzll(mask)));
    block += kNoiseBlock;
  }
  for (uint32_t id = block; id < row.size; ++id) offer(id);
  return static_cast<int32_t>(winner.id);
}

}  // namespace

int32_t draw_token(const Row& row, const Kept& kept, const Noise& noise,
                   const SamplerKernels& kernels, const Scratch& scratch) {
  constexpr size_t kLongList = 1024;  // from here on, searching the row is cheaper
  if (kept.listed && scratch.ranks.size() < kLongList)
    return draw_from_list(row, kept, noise, scratch.ranks);
  return draw_from_row(row, kept, noise, kernels);
}

}  // namespace triptych
