// What the machine can do at most, by the instructions that the matmul kernels use: what
// bench/kernels.py measures them against. The rule at the top of matmul.h holds here.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace triptych {

struct LimitKernels {
  // Multiplies and adds integers in registers alone, `rounds` times; how many multiply-adds. Of 16
  // bits, and of bytes as 4-bit weights with activations in bytes need them.
  uint64_t (*multiply_adds)(uint64_t rounds);
  uint64_t (*multiply_add_bytes)(uint64_t rounds);

  // Reads all bytes (a multiple of 256) and makes something of them that depends on each.
  int32_t (*read)(const uint8_t* bytes, size_t size);
};

// Of LimitKernels, from the files of the kernels that they limit.
uint64_t multiply_add_bytes_avx2(uint64_t rounds);
uint64_t multiply_add_bytes_avx512(uint64_t rounds);
uint64_t multiply_add_bytes_avx512vnni(uint64_t rounds);

extern const LimitKernels kLimitsScalar;
extern const LimitKernels kLimitsAvx2;
extern const LimitKernels kLimitsAvx512;
extern const LimitKernels kLimitsAvx512Vnni;

}  // namespace triptych
