#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace triptych {
namespace {

const Kernels kTable[] = {
#if defined(__x86_64__)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl");
     },
     &kSamplerAvx512},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); },
     &kSamplerAvx2},
#endif
    {"scalar", [] { return true; }, &kSamplerScalar},
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
