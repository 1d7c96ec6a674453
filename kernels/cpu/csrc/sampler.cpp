#include "sampler.h"

#include <algorithm>
#include <cmath>

#include "filters.h"
#include "philox.h"

namespace triptych {
namespace {

constexpr double kLargestGumbel = 37.0;  // -ln(-ln(1 - 2^-53)) = 36.74, rounded up

struct Noise {
  uint64_t seed;
  uint32_t choice;
  uint32_t position;
};

double gumbel(uint32_t id, const Noise& noise) {
  const auto key0 = static_cast<uint32_t>(noise.seed);
  const auto key1 = static_cast<uint32_t>(noise.seed >> 32);
  const uint32_t word = id & 3;
  const uint64_t high = philox4x32({id >> 2, 0, noise.choice, noise.position}, key0, key1)[word];
  const uint64_t low = philox4x32({id >> 2, 1, noise.choice, noise.position}, key0, key1)[word];
  const uint64_t odd = (high << 20 | low >> 12) << 1 | 1;
  return -std::log(-std::log(static_cast<double>(odd) * 0x1p-53));
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

// The logit under which no noise can make up for the distance.
float lowest_useful_logit(const Row& row, double score) {
  const double low = row.peak.value - (kLargestGumbel - score) / row.inverse_temperature;
  const auto rounded = static_cast<float>(std::max(low, double{-FLT_MAX}));
  return std::max(std::nextafter(rounded, -HUGE_VALF), -FLT_MAX);
}

int32_t draw_from_list(const Row& row, const Kept& kept, const Noise& noise,
                       const std::vector<Rank>& ranks) {
  Winner winner{row.peak.id, gumbel(row.peak.id, noise)};
  for (const Rank rank : ranks)
    if (rank >= kept.last)
      winner.offer(id_of(rank), gumbel(id_of(rank), noise) - row.distance(logit_of(rank)));
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
  Winner winner{row.peak.id, gumbel(row.peak.id, noise)};
  float cut = std::max(last_kept, lowest_useful_logit(row, winner.score));
  const auto offer = [&](uint32_t id) {
    const float logit = row.logits[id];
    if (logit < cut || rank_of(logit, id) < kept.last) return;
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

// A copy of the row with the banned ids at -inf: the matrix itself is somebody else's.
const float* without_banned(const float* logits, uint32_t size, const int32_t* first,
                            const int32_t* last, Scratch& scratch) {
  scratch.logits.assign(logits, logits + size);
  for (; first != last; ++first)
    if (*first >= 0 && static_cast<uint32_t>(*first) < size)
      scratch.logits[static_cast<size_t>(*first)] = -HUGE_VALF;
  return scratch.logits.data();
}

int32_t sample_row(const SampleBatch& batch, size_t i, const SamplerKernels& kernels,
                   Scratch& scratch) {
  const float* logits = batch.logits + i * batch.stride;
  const uint32_t size = batch.vocabulary_size;
  Peak peak = kernels.peak(logits, size);
  if (!peak.valid) return -1;
  if (batch.banned_starts[i] != batch.banned_starts[i + 1]) {
    logits = without_banned(logits, size, batch.banned_ids + batch.banned_starts[i],
                            batch.banned_ids + batch.banned_starts[i + 1], scratch);
    peak = kernels.peak(logits, size);
  }
  if (peak.value < -FLT_MAX) return -1;
  if (batch.temperature[i] == 0.0f) return static_cast<int32_t>(peak.id);

  const Row row{logits, size, peak, 1.0 / static_cast<double>(batch.temperature[i])};
  const RowParams params{batch.temperature[i], batch.top_k[i], batch.top_p[i], batch.min_p[i]};
  const Noise noise{batch.seed[i], batch.choice[i], batch.position[i]};
  const Kept kept = apply_filters(row, params, kernels, scratch);
  constexpr size_t kLongList = 1024;  // from here on, searching the row is cheaper
  if (kept.listed && scratch.ranks.size() < kLongList)
    return draw_from_list(row, kept, noise, scratch.ranks);
  return draw_from_row(row, kept, noise, kernels);
}

}  // namespace

void sample(const SampleBatch& batch, const SamplerKernels& kernels, int32_t* tokens) {
  Scratch scratch;
  for (size_t i = 0; i < batch.rows; ++i) tokens[i] = sample_row(batch, i, kernels, scratch);
}

}  // namespace triptych
