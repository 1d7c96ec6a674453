// e^x on sixteen lanes; included after a lanes_*.h.
#pragma once

namespace triptych {
namespace {

// Relative error below 2e-7. Below -87.33 and above 88.02 the result stays what it is there (about
// 1e-38 and 2e38): neither a zero nor an infinity comes out. NaN gives NaN; 0 gives exactly 1.
// Cody-Waite reduction by ln 2 in two parts, then the Taylor polynomial of degree 7 on
// [-ln 2 / 2, ln 2 / 2].
inline Lanes exponential(Lanes x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, to even
  x = min(set1(88.02f), max(set1(-87.33f), x));
  const Lanes shifted = fma(x, set1(kLog2E), set1(kShift));
  const Lanes power = sub(shifted, set1(kShift));
  Lanes rest = negated_fma(power, set1(kLn2High), x);
  rest = negated_fma(power, set1(kLn2Low), rest);
  Lanes value = set1(1.0f / 5040);
  value = fma(value, rest, set1(1.0f / 720));
  value = fma(value, rest, set1(1.0f / 120));
  value = fma(value, rest, set1(1.0f / 24));
  value = fma(value, rest, set1(1.0f / 6));
  value = fma(value, rest, set1(0.5f));
  value = fma(value, rest, set1(1.0f));
  value = fma(value, rest, set1(1.0f));
  return times_power(value, shifted);
}

}  // namespace
}  // namespace triptych
