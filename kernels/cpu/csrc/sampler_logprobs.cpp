#include "sampler_logprobs.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace triptych {
namespace {

class LogScale {
 public:
  LogScale(const Row& row, uint64_t total)
      : row_(row), log_total_(std::log(static_cast<double>(total) * 0x1p-44)) {}

  // Never an infinity: JSON has none.
  float of(float logit) const {
    const double value = 0.0 - row_.distance(logit) - log_total_;
    return static_cast<float>(std::min(std::max(value, double{-FLT_MAX}), 0.0));
  }

 private:
  const Row& row_;
  double log_total_;
};

// Sorts scratch.ranks, of which the first `top` are reported.
void report_top(size_t top, const LogScale& scale, std::vector<Rank>& ranks, TokenLogprobs& out) {
  top = std::min(top, ranks.size());
  std::partial_sort(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(top), ranks.end(),
                    std::greater<>());
  out.top_ids.resize(top);
  out.top_logprobs.resize(top);
  for (size_t i = 0; i < top; ++i) {
    out.top_ids[i] = static_cast<int32_t>(id_of(ranks[i]));
    out.top_logprobs[i] = scale.of(logit_of(ranks[i]));
  }
}

}  // namespace

TokenLogprobs row_logprobs(const Row& row, uint32_t token, size_t top,
                           const SamplerKernels& kernels, Scratch& scratch) {
  uint64_t total = 0;
  mass_row(row, 0.0f, kernels, [&](const uint64_t* masses, const int32_t*) {
    for (size_t i = 0; i < kMassBlock; ++i) total += masses[i];
  });
  const LogScale scale(row, total);
  TokenLogprobs out;
  out.logprob = scale.of(row.logits[token]);
  out.rank =
      1 + static_cast<uint32_t>(kernels.count_above(row.logits, row.size, row.logits[token]));
  if (top > 0) {
    list_best(row, top, kernels, scratch);
    report_top(top, scale, scratch.ranks, out);
  }
  return out;
}

TokenLogprobs kept_logprobs(const Row& row, Kept kept, uint32_t token, size_t top,
                            const SamplerKernels& kernels, Scratch& scratch) {
  list_kept(row, kept, kernels, scratch);
  std::vector<Rank>& ranks = scratch.ranks;
  const LogScale scale(
      row, mass_ranks(row, ranks.data(), ranks.data() + ranks.size(), kernels, scratch.masses));
  TokenLogprobs out;
  const float logit = row.logits[token];
  out.logprob = scale.of(logit);
  out.rank = 1 + static_cast<uint32_t>(std::count_if(ranks.begin(), ranks.end(), [&](Rank rank) {
               return logit_of(rank) > logit;
             }));
  report_top(top, scale, ranks, out);
  return out;
}

}  // namespace triptych
