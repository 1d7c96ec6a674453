#include "mass_filters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

namespace triptych {
namespace {

constexpr float kBinsPerNat = 32.0f;

using Bins = std::array<uint64_t, kMassBins>;

// The first bin at which the mass reaches `wanted`, and the mass in front of it.
struct Border {
  int bin;
  uint64_t before;
};

Border border_of(const Bins& bins, double wanted) {
  Border border{0, 0};
  for (; border.bin < kMassBins - 1; ++border.bin) {
    const uint64_t reached = border.before + bins[static_cast<size_t>(border.bin)];
    // An empty bin never is the border: the one before it was, or nothing has mass yet.
    if (reached > border.before && static_cast<double>(reached) >= wanted) break;
    border.before = reached;
  }
  return border;
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

// Of a number below 2^63: converting signed ones is one instruction.
double signed_double(uint64_t number) { return static_cast<double>(static_cast<int64_t>(number)); }

uint32_t deviation_bin(double deviation) {
  constexpr double kLast = kMassBins - 1;
  return static_cast<uint32_t>(
      static_cast<int32_t>(std::min(deviation * double{kBinsPerNat}, kLast)));
}

}  // namespace

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
  Bins binned{}, binned_odd{};  // two, so that adds overlap
  mass_row(row, scale, kernels, [&](const uint64_t* masses, const int32_t* bins) {
    for (size_t i = 0; i < kMassBlock; i += 2) {
      binned[static_cast<size_t>(bins[i])] += masses[i];
      binned_odd[static_cast<size_t>(bins[i + 1])] += masses[i + 1];
    }
  });
  uint64_t total = 0;
  for (size_t bin = 0; bin < kMassBins; ++bin) total += binned[bin] += binned_odd[bin];
  const double wanted = top_p * static_cast<double>(total);
  const Border border = border_of(binned, wanted);

  const float top = row.peak.value;
  const auto edge = [&](int bin) {
    return lowest_logit(top,
                        [&](float x) { return (top - x) * scale < static_cast<float>(bin + 1); });
  };
  const float low = border.bin == kMassBins - 1 ? -FLT_MAX : edge(border.bin);
  const float high = border.bin == 0 ? HUGE_VALF : edge(border.bin - 1);
  list_between(row, low, high, kernels, scratch);
  return rank_reaching(row, border.before, wanted, kernels, scratch);
}

// Information content minus entropy is distance minus mean distance: the normaliser cancels. The
// mean is taken over integers, so that it does not depend on the order of adding. Then, as for
// top_p, only the bin of deviations in which typical_p falls is sorted.
void keep_typical(const Row& row, double typical_p, const SamplerKernels& kernels,
                  Scratch& scratch) {
  std::vector<Rank>& ranks = scratch.ranks;
  std::vector<double>& deviations = scratch.deviations;
  const size_t size = ranks.size();
  const uint64_t total =
      mass_ranks(row, ranks.data(), ranks.data() + size, kernels, scratch.masses);
  const uint64_t* masses = scratch.masses.data();
  deviations.resize(size);
  int64_t moment = 0;
  for (size_t i = 0; i < size; ++i) {
    deviations[i] = row.distance(logit_of(ranks[i]));
    // What has no mass may be infinitely far; what has some is less than 31 nats away.
    moment += static_cast<int64_t>(signed_double(masses[i]) * std::min(deviations[i], 64.0));
  }
  const double mean = static_cast<double>(moment) / static_cast<double>(total);
  const double wanted = std::max(typical_p * static_cast<double>(total), 1.0);
  Bins binned{};
  std::vector<uint32_t>& bins = scratch.ids;
  bins.resize(size);
  for (size_t i = 0; i < size; ++i) {
    deviations[i] = std::fabs(deviations[i] - mean);
    bins[i] = deviation_bin(deviations[i]);
    binned[bins[i]] += masses[i];
  }
  Border border = border_of(binned, wanted);
  std::vector<std::pair<double, uint64_t>> at_border;
  for (size_t i = 0; i < size; ++i)
    if (bins[i] == static_cast<uint32_t>(border.bin))
      at_border.emplace_back(deviations[i], masses[i]);
  std::sort(at_border.begin(), at_border.end());
  double limit = HUGE_VAL;
  for (const auto& [deviation, mass] : at_border) {
    border.before += mass;
    if (static_cast<double>(border.before) < wanted) continue;
    limit = deviation;
    break;
  }
  size_t kept = 0;
  for (size_t i = 0; i < size; ++i) {  // without a branch: which ones stay is hard to predict
    ranks[kept] = ranks[i];
    kept += deviations[i] <= limit;
  }
  ranks.resize(kept);
}

}  // namespace triptych
