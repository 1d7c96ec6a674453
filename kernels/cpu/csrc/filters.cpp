#include "filters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

namespace triptych {
namespace {

constexpr float kBinsPerNat = 32.0f;

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

// Leaves in scratch.ranks the best `k` ids (all finite ones if there are fewer), in no order. One
// pass: what is not above the k-th best so far cannot enter, since later ids lose ties.
void select_top_k(const Row& row, size_t k, const SamplerKernels& kernels, Scratch& scratch) {
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

// The masses of ranks [first, last), in their order, by the kernel that masses whole rows; their
// sum.
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

// The first of scratch.ranks, taken in order, at which the mass reaches `wanted`, where `before`
// has gone by already. Halves the range until what is left is worth sorting.
Rank rank_reaching(const Row& row, uint64_t before, double wanted, const SamplerKernels& kernels,
                   Scratch& scratch) {
  constexpr std::ptrdiff_t kShort = 256;
  Rank* first = scratch.ranks.data();
  Rank* last = first + scratch.ranks.size();
  while (last - first > kShort) {
    Rank* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater<>());
    const uint64_t upper = mass_ranks(row, first, middle, kernels, scratch.masses);
    if (static_cast<double>(before + upper) >= wanted) {
      last = middle;
    } else {
      before += upper;
      first = middle;
    }
  }
  std::sort(first, last, std::greater<>());
  mass_ranks(row, first, last, kernels, scratch.masses);
  for (const uint64_t* mass = scratch.masses.data(); first + 1 < last; ++first, ++mass) {
    before += *mass;
    if (static_cast<double>(before) >= wanted) break;
  }
  return *first;
}

Rank top_p_of_ranks(const Row& row, double top_p, const SamplerKernels& kernels, Scratch& scratch) {
  const Rank* first = scratch.ranks.data();
  const uint64_t total =
      mass_ranks(row, first, first + scratch.ranks.size(), kernels, scratch.masses);
  return rank_reaching(row, 0, top_p * static_cast<double>(total), kernels, scratch);
}

// The mass of the row in bins by distance from the peak: only the bin in which top_p falls is
// sorted.
Rank top_p_of_row(const Row& row, double top_p, const SamplerKernels& kernels, Scratch& scratch) {
  const float scale =
      static_cast<float>(std::min(row.inverse_temperature * double{kBinsPerNat}, 1e30));
  std::array<uint64_t, kMassBins> binned{}, binned_odd{};  // two, so that adds overlap
  std::array<uint64_t, kMassBlock> masses;
  std::array<int32_t, kMassBlock> bins;
  std::array<float, kMassBlock> rest;
  for (size_t start = 0; start < row.size; start += kMassBlock) {
    const float* logits = row.logits + start;
    if (row.size - start < kMassBlock) {
      rest.fill(-HUGE_VALF);
      std::copy(logits, row.logits + row.size, rest.begin());
      logits = rest.data();
    }
    kernels.masses(logits, row.peak.value, row.inverse_temperature, scale, masses.data(),
                   bins.data());
    for (size_t i = 0; i < kMassBlock; i += 2) {
      binned[static_cast<size_t>(bins[i])] += masses[i];
      binned_odd[static_cast<size_t>(bins[i + 1])] += masses[i + 1];
    }
  }
  for (size_t bin = 0; bin < kMassBins; ++bin) binned[bin] += binned_odd[bin];
  uint64_t total = 0;
  for (const uint64_t mass : binned) total += mass;
  const double wanted = top_p * static_cast<double>(total);
  int border = 0;
  uint64_t before = 0;
  for (; border < kMassBins - 1; ++border) {
    const uint64_t reached = before + binned[static_cast<size_t>(border)];
    // An empty bin never is the border: the one before it was, or nothing has mass yet.
    if (reached > before && static_cast<double>(reached) >= wanted) break;
    before = reached;
  }

  const float top = row.peak.value;
  const auto edge = [&](int bin) {
    return lowest_logit(top,
                        [&](float x) { return (top - x) * scale < static_cast<float>(bin + 1); });
  };
  const float low = border == kMassBins - 1 ? -FLT_MAX : edge(border);
  const float high = border == 0 ? HUGE_VALF : edge(border - 1);
  scratch.ids.resize(row.size + 16);
  size_t next = 0;
  const size_t count = kernels.collect(row.logits, row.size, low, high, &next, scratch.ids.data(),
                                       scratch.ids.size());
  scratch.ranks.clear();
  for (size_t i = 0; i < count; ++i)
    scratch.ranks.push_back(rank_of(row.logits[scratch.ids[i]], scratch.ids[i]));
  return rank_reaching(row, before, wanted, kernels, scratch);
}

}  // namespace

Kept apply_filters(const Row& row, const RowParams& params, const SamplerKernels& kernels,
                   Scratch& scratch) {
  Kept kept{last_finite_rank(), false};
  if (params.top_k > 0 && static_cast<uint32_t>(params.top_k) < row.size) {
    select_top_k(row, static_cast<size_t>(params.top_k), kernels, scratch);
    kept = {*std::min_element(scratch.ranks.begin(), scratch.ranks.end()), true};
  }
  if (params.top_p < 1.0f) {
    const double top_p = params.top_p;
    kept.last = kept.listed ? top_p_of_ranks(row, top_p, kernels, scratch)
                            : top_p_of_row(row, top_p, kernels, scratch);
  }
  if (params.min_p > 0.0f) {
    const double reach = -std::log(static_cast<double>(params.min_p));
    const float lowest =
        lowest_logit(row.peak.value, [&](float logit) { return row.distance(logit) <= reach; });
    kept.last = std::max(kept.last, Rank{order_bits(lowest)} << 32);
  }
  return kept;
}

}  // namespace triptych
