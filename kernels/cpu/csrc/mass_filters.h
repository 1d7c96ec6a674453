// top_p (nucleus sampling; Holtzman et al.: The curious case of neural text degeneration, 2020) and
// typical_p (Meister et al.: Locally typical sampling, 2023).
#pragma once
#include "sampler_row.h"

namespace triptych {

// The last rank that top_p leaves of the whole row. 0 <= top_p < 1.
Rank top_p_of_row(const Row& row, double top_p, const SamplerKernels& kernels, Scratch& scratch);

// The same of scratch.ranks, which is not empty; reorders them.
Rank top_p_of_ranks(const Row& row, double top_p, const SamplerKernels& kernels, Scratch& scratch);

// Takes from scratch.ranks, which is not empty, what typical_p does not leave. 0 <= typical_p < 1.
void keep_typical(const Row& row, double typical_p, const SamplerKernels& kernels,
                  Scratch& scratch);

}  // namespace triptych
