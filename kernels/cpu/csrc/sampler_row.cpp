#include "sampler_row.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

namespace triptych {

void list_between(const Row& row, float low, float high, const SamplerKernels& kernels,
                  Scratch& scratch) {
  scratch.ids.resize(row.size + 16);
  size_t next = 0;
  const size_t count = kernels.collect(row.logits, row.size, low, high, &next, scratch.ids.data(),
                                       scratch.ids.size());
  scratch.ranks.resize(count);
  for (size_t i = 0; i < count; ++i)
    scratch.ranks[i] = rank_of(row.logits[scratch.ids[i]], scratch.ids[i]);
}

// One pass: what is not above the k-th best so far cannot enter, since later ids lose ties.
void list_best(const Row& row, size_t k, const SamplerKernels& kernels, Scratch& scratch) {
  std::vector<Rank>& ranks = scratch.ranks;
  const size_t capacity = std::min<size_t>(std::max<size_t>(4 * k, 256), row.size) + 16;
  scratch.ids.resize(capacity);
  ranks.clear();
  float low = -FLT_MAX;
  for (size_t next = 0; next < row.size;) {
    const size_t count = kernels.collect(row.logits, row.size, low, HUGE_VALF, &next,
                                         scratch.ids.data(), capacity - ranks.size());
    for (size_t i = 0; i < count; ++i)
      ranks.push_back(rank_of(row.logits[scratch.ids[i]], scratch.ids[i]));
    if (ranks.size() <= k) continue;
    std::nth_element(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(k - 1), ranks.end(),
                     std::greater<>());
    ranks.resize(k);
    low = std::nextafter(logit_of(ranks[k - 1]), HUGE_VALF);
  }
}

void list_kept(const Row& row, Kept& kept, const SamplerKernels& kernels, Scratch& scratch) {
  if (kept.listed) return;
  list_between(row, logit_of(kept.last), HUGE_VALF, kernels, scratch);
  kept.listed = true;
  std::vector<Rank>& ranks = scratch.ranks;
  // From the peak to between two logits: just what was collected.
  if (static_cast<uint32_t>(kept.last) == 0 && kept.first == keep_all(row).first) return;
  ranks.erase(std::remove_if(ranks.begin(), ranks.end(),
                             [&](Rank rank) { return rank < kept.last || rank > kept.first; }),
              ranks.end());
}

uint64_t mass_ranks(const Row& row, const Rank* first, const Rank* last,
                    const SamplerKernels& kernels, std::vector<uint64_t>& masses) {
  std::array<float, kMassBlock> logits;
  std::array<int32_t, kMassBlock> bins;
  const auto count = static_cast<size_t>(last - first);
  masses.resize((count + kMassBlock - 1) / kMassBlock * kMassBlock);
  for (size_t start = 0; start < count; start += kMassBlock) {
    for (size_t i = 0; i < kMassBlock; ++i)
      logits[i] = start + i < count ? logit_of(first[start + i]) : -HUGE_VALF;
    kernels.masses(logits.data(), row.peak.value, row.inverse_temperature, 0.0f,
                   masses.data() + start, bins.data());
  }
  return std::accumulate(masses.begin(), masses.end(), uint64_t{0});
}

}  // namespace triptych
