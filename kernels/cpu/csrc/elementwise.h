// What a plan computes between its matrix products, on float32. Every instruction set gives the
// same bits: sixteen lanes whatever the registers, sums by one fixed tree, one exponential.
//
// Included by the files that are compiled with AVX flags: no inline functions, C's library only.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace triptych {

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct ElementwiseKernels {
  // out = x / sqrt(mean(x^2) + epsilon) * weight, [size]; out may be x.
  void (*rms_norm)(const float* x, const float* weight, float epsilon, size_t size, float* out);

  // gate = activation(gate) * up, [size].
  void (*gate)(Activation activation, float* gate, const float* up, size_t size);

  // Turns the pairs (head[i], head[half + i]) by the angle whose cosine and sine are cos[i] and
  // sin[i], then multiplies by `scale`. [2 * half]
  void (*rotate)(float* head, const float* cos, const float* sin, size_t half, float scale);

  // x = cap * tanh(x / cap), [size].
  void (*soft_cap)(float* x, float cap, size_t size);

  // x += y, [size].
  void (*add)(float* x, const float* y, size_t size);
};

extern const ElementwiseKernels kElementwiseScalar;
extern const ElementwiseKernels kElementwiseAvx2;
extern const ElementwiseKernels kElementwiseAvx512;

}  // namespace triptych
