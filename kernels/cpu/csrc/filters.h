// top_k, top_p, min_p: which ids of a row may be drawn.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ranking.h"
#include "sampler_kernels.h"

namespace triptych {

struct RowParams {
  float temperature;  // > 0
  int32_t top_k;      // <= 0: off
  float top_p;        // >= 1: off
  float min_p;        // <= 0: off
};

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

// Buffers that the rows of one call share.
struct Scratch {
  std::vector<float> logits;
  std::vector<uint32_t> ids;
  std::vector<Rank> ranks;
  std::vector<uint64_t> masses;
};

// What the filters leave: the ids that rank `last` or better. When `listed`, scratch.ranks holds
// them all (and perhaps some that rank behind `last`).
struct Kept {
  Rank last;
  bool listed;
};

Kept apply_filters(const Row& row, const RowParams& params, const SamplerKernels& kernels,
                   Scratch& scratch);

}  // namespace triptych
