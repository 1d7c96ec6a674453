// The one table of instruction sets. A kernel file never asks the processor; this does.
#pragma once
#include <string>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "machine_limits.h"
#include "matmul.h"
#include "sampler_kernels.h"

namespace triptych {

struct Kernels {
  const char* name;
  bool (*runs_here)();
  const SamplerKernels* sampler;
  const MatmulKernels* matmul;
  const MatmulKernels* matmul_int8;
  const ElementwiseKernels* elementwise;
  const AttentionKernels* attention;
  const LimitKernels* limits;
};

// Best first. "scalar" always runs.
std::vector<std::string> supported_isas();

// Those of `kernels` for activations of which `limit` is the largest code.
const MatmulKernels& matmul_kernels(const Kernels& kernels, int limit);

// For the whole process. Throws std::invalid_argument when this machine cannot run `name`.
void select_isa(const std::string& name);

// The selected set; until select_isa is called, the best that this machine runs.
const Kernels& active_kernels();

}  // namespace triptych
