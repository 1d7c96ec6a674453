// The elementwise kernels over the sixteen lanes of a lanes_*.h, which is included before.
#include "elementwise.h"
#include "lanes_exp.h"

namespace triptych {
namespace {

// Calls f(start, lanes in use) for each sixteen of `size` elements.
template <typename F>
inline void for_lanes(size_t size, F f) {
  size_t at = 0;
  for (; at + 16 <= size; at += 16) f(at, 16);
  if (at < size) f(at, static_cast<int>(size - at));
}

inline Lanes take(const float* from, int count) {
  return count == 16 ? load(from) : load_part(from, count);
}

inline void put(float* to, const Lanes& a, int count) {
  if (count == 16)
    store(to, a);
  else
    store_part(to, a, count);
}

void rms_norm(const float* x, const float* weight, float epsilon, size_t size, float* out) {
  Lanes squares = set1(0.0f);
  for_lanes(size, [&](size_t at, int count) {
    const Lanes a = take(x + at, count);
    squares = fma(a, a, squares);
  });
  const float mean = sum(squares) / static_cast<float>(size);
  const Lanes inverse = set1(1.0f / __builtin_sqrtf(mean + epsilon));
  for_lanes(size, [&](size_t at, int count) {
    put(out + at, mul(mul(take(x + at, count), inverse), take(weight + at, count)), count);
  });
}

// x * sigmoid(y)
inline Lanes sigmoid_times(const Lanes& x, const Lanes& y) {
  return div(x, add(set1(1.0f), exponential(sub(set1(0.0f), y))));
}

inline Lanes silu(const Lanes& x) { return sigmoid_times(x, x); }

// x * (1 + tanh(u)) / 2 = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Lanes gelu_tanh(const Lanes& x) {
  const Lanes inner = fma(mul(mul(x, x), x), set1(0.044715f), x);
  return sigmoid_times(x, mul(inner, set1(1.5957691216f)));
}

template <Lanes activate(const Lanes&)>
inline void gate_with(float* gate, const float* up, size_t size) {
  for_lanes(size, [&](size_t at, int count) {
    put(gate + at, mul(activate(take(gate + at, count)), take(up + at, count)), count);
  });
}

void gate(Activation activation, float* gate, const float* up, size_t size) {
  if (activation == Activation::kSilu)
    gate_with<silu>(gate, up, size);
  else
    gate_with<gelu_tanh>(gate, up, size);
}

void rotate(float* head, const float* cos, const float* sin, size_t half, float scale) {
  for_lanes(half, [&](size_t at, int count) {
    const Lanes a = take(head + at, count), b = take(head + half + at, count);
    const Lanes c = take(cos + at, count), s = take(sin + at, count), factor = set1(scale);
    put(head + at, mul(negated_fma(b, s, mul(a, c)), factor), count);
    put(head + half + at, mul(fma(a, s, mul(b, c)), factor), count);
  });
}

void cap_softly(float* x, float cap, size_t size) {
  const Lanes bound = set1(cap), inverse = set1(1.0f / cap);
  for_lanes(size, [&](size_t at, int count) {
    put(x + at, soft_cap(take(x + at, count), bound, inverse), count);
  });
}

void add_to(float* x, const float* y, size_t size) {
  for_lanes(size, [&](size_t at, int count) {
    put(x + at, add(take(x + at, count), take(y + at, count)), count);
  });
}

constexpr ElementwiseKernels kElementwise = {rms_norm, gate, rotate, cap_softly, add_to};

}  // namespace
}  // namespace triptych
