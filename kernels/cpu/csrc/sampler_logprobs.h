// Logarithms of probabilities that clients see. The probabilities come from integer masses, so the
// same row gives the same bits on every instruction set and in every batch.
#pragma once
#include "sampler_row.h"

namespace triptych {

struct TokenLogprobs {
  float logprob;
  uint32_t rank;  // 1 + how many are more likely
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
};

// Of `token` and of the `top` most likely tokens (fewer where fewer have any probability), by the
// softmax of the row at its temperature over all its finite logits.
TokenLogprobs row_logprobs(const Row& row, uint32_t token, size_t top,
                           const SamplerKernels& kernels, Scratch& scratch);

// The same over what is kept, of which `token` is one.
TokenLogprobs kept_logprobs(const Row& row, Kept kept, uint32_t token, size_t top,
                            const SamplerKernels& kernels, Scratch& scratch);

}  // namespace triptych
