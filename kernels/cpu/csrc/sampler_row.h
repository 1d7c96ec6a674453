// A row of logits that is to be drawn from, and what the steps of drawing share.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "logit_ranks.h"
#include "sampler_kernels.h"

namespace triptych {

// A row without NaN and +inf, with at least one finite logit.
struct Row {
  const float* logits;
  uint32_t size;
  Peak peak;
  double inverse_temperature;

  // How far a logit lies under the peak, in nats at the row's temperature.
  double distance(float logit) const {
    return (static_cast<double>(peak.value) - static_cast<double>(logit)) * inverse_temperature;
  }
};

// Buffers that the rows of one sampler share.
struct Scratch {
  std::vector<float> logits;
  std::vector<uint32_t> ids;
  std::vector<Rank> ranks;
  std::vector<uint64_t> masses;
  std::vector<double> deviations;
};

// What the filters leave: the ids that rank within `first` .. `last`. When `listed`, scratch.ranks
// holds exactly them, in no order.
struct Kept {
  Rank first;
  Rank last;
  bool listed;
};

// Every finite logit.
inline Kept keep_all(const Row& row) {
  return {rank_of(row.peak.value, row.peak.id), last_finite_rank(), false};
}

// Leaves in scratch.ranks the ids of the row with low <= logit < high, in no order.
void list_between(const Row& row, float low, float high, const SamplerKernels& kernels,
                  Scratch& scratch);

// Leaves in scratch.ranks the best `k` ids (all finite ones if there are fewer), in no order.
void list_best(const Row& row, size_t k, const SamplerKernels& kernels, Scratch& scratch);

// Lists what is kept, if it is not.
void list_kept(const Row& row, Kept& kept, const SamplerKernels& kernels, Scratch& scratch);

// The masses of ranks [first, last), in their order, by the kernel that masses whole rows; their
// sum. A mass is floor(2^44 * exp(-distance)).
uint64_t mass_ranks(const Row& row, const Rank* first, const Rank* last,
                    const SamplerKernels& kernels, std::vector<uint64_t>& masses);

// Calls take(masses, bins) with the masses of the row, kMassBlock at a time, and their bins at
// `bin_scale` a logit; what pads the last block has no mass.
template <typename Take>
void mass_row(const Row& row, float bin_scale, const SamplerKernels& kernels, const Take& take) {
  uint64_t masses[kMassBlock];
  int32_t bins[kMassBlock];
  float rest[kMassBlock];
  for (size_t start = 0; start < row.size; start += kMassBlock) {
    const float* logits = row.logits + start;
    if (row.size - start < kMassBlock) {
      for (size_t i = 0; i < kMassBlock; ++i)
        rest[i] = i < row.size - start ? logits[i] : -HUGE_VALF;
      logits = rest;
    }
    kernels.masses(logits, row.peak.value, row.inverse_temperature, bin_scale, masses, bins);
    take(masses, bins);
  }
}

}  // namespace triptych
