#include "sampler_filters.h"

#include <algorithm>
#include <cmath>

#include "mass_filters.h"

namespace triptych {
namespace {

// Raises the last rank kept, in the list too.
void keep_from(Rank last, Kept& kept, std::vector<Rank>& ranks) {
  if (last <= kept.last) return;
  kept.last = last;
  if (!kept.listed) return;
  ranks.erase(std::remove_if(ranks.begin(), ranks.end(), [&](Rank rank) { return rank < last; }),
              ranks.end());
}

Rank rank_at(float lowest) { return Rank{order_bits(lowest)} << 32; }

// Tang et al.: Top-n sigma: Not all logits are you need (2024). Does not depend on the temperature.
Rank last_of_sigma(const Row& row, float top_n_sigma, const SamplerKernels& kernels) {
  const double peak = row.peak.value;
  const auto count = static_cast<double>(kernels.count_above(row.logits, row.size, -HUGE_VALF));
  const Spread spread = kernels.spread(row.logits, row.size, peak);
  const double mean = spread.sum / count;
  const double variance = std::max(spread.squares / count - mean * mean, 0.0);
  const double reach = static_cast<double>(top_n_sigma) * std::sqrt(variance);
  return rank_at(lowest_logit(row.peak.value,
                              [&](float x) { return peak - static_cast<double>(x) <= reach; }));
}

void set_ends(Kept& kept, const std::vector<Rank>& ranks) {
  const auto [last, first] = std::minmax_element(ranks.begin(), ranks.end());
  kept = {*first, *last, true};
}

}  // namespace

Kept apply_filters(const Row& row, const Filters& filters, const SamplerKernels& kernels,
                   Scratch& scratch) {
  Kept kept = keep_all(row);
  std::vector<Rank>& ranks = scratch.ranks;
  if (filters.top_n_sigma > 0.0f)
    keep_from(last_of_sigma(row, filters.top_n_sigma, kernels), kept, ranks);
  if (filters.top_k > 0 && static_cast<uint32_t>(filters.top_k) < row.size) {
    const Rank last = kept.last;
    list_best(row, static_cast<size_t>(filters.top_k), kernels, scratch);
    set_ends(kept, ranks);
    keep_from(last, kept, ranks);
  }
  if (filters.typical_p < 1.0f) {
    list_kept(row, kept, kernels, scratch);
    keep_typical(row, filters.typical_p, kernels, scratch);
    set_ends(kept, ranks);
  }
  if (filters.top_p < 1.0f) {
    if (!kept.listed && kept.last != last_finite_rank()) list_kept(row, kept, kernels, scratch);
    keep_from(kept.listed ? top_p_of_ranks(row, filters.top_p, kernels, scratch)
                          : top_p_of_row(row, filters.top_p, kernels, scratch),
              kept, ranks);
  }
  if (filters.min_p > 0.0f) {
    const float best = logit_of(kept.first);
    const double start = row.distance(best), reach = -std::log(static_cast<double>(filters.min_p));
    keep_from(
        rank_at(lowest_logit(best, [&](float x) { return row.distance(x) - start <= reach; })),
        kept, ranks);
  }
  return kept;
}

}  // namespace triptych
