// What the machine can do at most, by the instructions that the matmul kernels use: what
// bench/kernels.py measures them against. The rule at the top of matmul.h holds here.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace triptych {

struct LimitKernels {
  // Multiplies and adds 16-bit integers in registers alone, `rounds` times; how many multiply-adds.
  uint64_t (*multiply_adds)(uint64_t rounds);

  // Reads all bytes (a multiple of 256) and makes something of them that depends on each.
  int32_t (*read)(const uint8_t* bytes, size_t size);
};

extern const LimitKernels kLimitsScalar;
extern const LimitKernels kLimitsAvx2;
extern const LimitKernels kLimitsAvx512;
extern const LimitKernels kLimitsAvx512Vnni;

}  // namespace triptych
