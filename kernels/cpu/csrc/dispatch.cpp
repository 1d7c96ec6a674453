#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace triptych {
namespace {

#if defined(__x86_64__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

bool runs_avx512vnni() { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

const Kernels kTable[] = {
#if defined(__x86_64__)
    {"avx512vnni", runs_avx512vnni, &kSamplerAvx512, &kMatmulAvx512Vnni, &kMatmulInt8Avx512Vnni,
     &kElementwiseAvx512, &kAttentionAvx512, &kLimitsAvx512Vnni},
    {"avx512", runs_avx512, &kSamplerAvx512, &kMatmulAvx512, &kMatmulInt8Avx512,
     &kElementwiseAvx512, &kAttentionAvx512, &kLimitsAvx512},
    {"avx2", runs_avx2, &kSamplerAvx2, &kMatmulAvx2, &kMatmulInt8Avx2, &kElementwiseAvx2,
     &kAttentionAvx2, &kLimitsAvx2},
#endif
    {"scalar", [] { return true; }, &kSamplerScalar, &kMatmulScalar, &kMatmulInt8Scalar,
     &kElementwiseScalar, &kAttentionScalar, &kLimitsScalar},
};

const Kernels& best() {
  const Kernels* kernels = kTable;
  while (!kernels->runs_here()) ++kernels;
  return *kernels;
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> kernels{&best()};
  return kernels;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels& kernels : kTable)
    if (kernels.runs_here()) names.emplace_back(kernels.name);
  return names;
}

const MatmulKernels& matmul_kernels(const Kernels& kernels, int limit) {
  return limit <= kActivationLimit8 ? *kernels.matmul_int8 : *kernels.matmul;
}

void select_isa(const std::string& name) {
  for (const Kernels& kernels : kTable) {
    if (name == kernels.name && kernels.runs_here()) {
      active() = &kernels;
      return;
    }
  }
  throw std::invalid_argument("this machine cannot run CPU kernels for '" + name + "'");
}

const Kernels& active_kernels() { return *active(); }

}  // namespace triptych
