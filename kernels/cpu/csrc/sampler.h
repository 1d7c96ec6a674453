// One token per row of a logits matrix. docs/sampling.md states the meaning; the plain definition
// is kernels/reference/sampler.py.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sampler_kernels.h"

namespace triptych {

// Columns of `rows` entries; banned ids of row i are banned_ids[banned_starts[i] .. [i + 1]).
struct SampleBatch {
  const float* logits;  // [rows, stride], read only
  size_t rows;
  size_t stride;
  uint32_t vocabulary_size;  // 1 .. stride
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seed;
  const uint32_t* choice;
  const uint32_t* position;
  const int32_t* banned_ids;
  const int32_t* banned_starts;
};

// Writes the token of each row, -1 where none can be drawn.
void sample(const SampleBatch& batch, const SamplerKernels& kernels, int32_t* tokens);

}  // namespace triptych
