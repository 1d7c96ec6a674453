// The draw itself: argmax(Gumbel noise - distance) over what the filters kept.
#pragma once
#include "sampler_row.h"

namespace triptych {

// Keys the noise of a row's tokens.
struct Noise {
  uint64_t seed;
  uint32_t choice;
  uint32_t position;
};

int32_t draw_token(const Row& row, const Kept& kept, const Noise& noise,
                   const SamplerKernels& kernels, const Scratch& scratch);

}  // namespace triptych
