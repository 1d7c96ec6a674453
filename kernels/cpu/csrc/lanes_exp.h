// e^x and tanh on sixteen lanes; included after a lanes_*.h.
#pragma once

namespace triptych {
namespace {

// x = power * ln 2 + rest, |rest| <= ln 2 / 2. Cody-Waite reduction by ln 2 in two parts.
struct Reduced {
  Lanes shifted;  // its low bits hold `power`, as times_power() takes them
  Lanes rest;
};

inline Reduced reduce(const Lanes& x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, to even
  const Lanes shifted = fma(x, set1(kLog2E), set1(kShift));
  const Lanes power = sub(shifted, set1(kShift));
  const Lanes rest = negated_fma(power, set1(kLn2High), x);
  return {shifted, negated_fma(power, set1(kLn2Low), rest)};
}

// (e^rest - 1) / rest: the Taylor polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2].
inline Lanes slope(const Lanes& rest) {
  Lanes value = set1(1.0f / 5040);
  value = fma(value, rest, set1(1.0f / 720));
  value = fma(value, rest, set1(1.0f / 120));
  value = fma(value, rest, set1(1.0f / 24));
  value = fma(value, rest, set1(1.0f / 6));
  value = fma(value, rest, set1(0.5f));
  return fma(value, rest, set1(1.0f));
}

// Relative error below 2e-7. Below -87.33 and above 88.02 the result stays what it is there (about
// 1e-38 and 2e38): neither a zero nor an infinity comes out. NaN gives NaN; 0 gives exactly 1.
inline Lanes exponential(Lanes x) {
  x = min(set1(88.02f), max(set1(-87.33f), x));
  const Reduced parts = reduce(x);
  const Lanes value = fma(slope(parts.rest), parts.rest, set1(1.0f));
  return times_power(value, parts.shifted);
}

// Relative error below 5e-7, magnitude at most 1. NaN gives NaN; 0 gives 0. As m / (m + 2) with
// m = e^2x - 1 = 2^power (e^rest - 1) + (2^power - 1), which loses nothing where x is small.
inline Lanes hyperbolic_tangent(Lanes x) {
  x = min(set1(10.0f), max(set1(-10.0f), x));  // there it is 1 to float32's precision
  const Reduced parts = reduce(add(x, x));
  const Lanes scale = times_power(set1(1.0f), parts.shifted);
  const Lanes m = fma(mul(slope(parts.rest), parts.rest), scale, sub(scale, set1(1.0f)));
  return div(m, add(m, set1(2.0f)));
}

// cap * tanh(x / cap), of which `inverse` is 1 / cap.
inline Lanes soft_cap(const Lanes& x, const Lanes& cap, const Lanes& inverse) {
  return mul(cap, hyperbolic_tangent(mul(x, inverse)));
}

}  // namespace
}  // namespace triptych
