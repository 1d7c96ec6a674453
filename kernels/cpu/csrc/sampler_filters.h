// top_n_sigma, top_k, typical_p, top_p, min_p: which ids of a row may be drawn.
#pragma once
#include "sampler_row.h"

namespace triptych {

struct Filters {
  float top_n_sigma = 0.0f;  // <= 0: off
  int32_t top_k = 0;         // <= 0: off
  float typical_p = 1.0f;    // >= 1: off
  float top_p = 1.0f;        // >= 1: off
  float min_p = 0.0f;        // <= 0: off
};

// In the order of docs/sampling.md.
Kept apply_filters(const Row& row, const Filters& filters, const SamplerKernels& kernels,
                   Scratch& scratch);

}  // namespace triptych
