// What the core throws beside the standard library's own; bindings.cpp gives each the Python type
// that the plain twin raises.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace triptych {

// A caller broke the contract, or the structure is damaged (AssertionError).
struct BrokenInvariant : std::logic_error {
  using std::logic_error::logic_error;
};

// No such open sequence (KeyError).
struct UnknownSequence : std::out_of_range {
  using std::out_of_range::out_of_range;
};

// For numbers that Python gives: std::overflow_error (OverflowError) for what does not fit 32 bits.
inline int32_t Narrow(int64_t value) {
  if (value < INT32_MIN || value > INT32_MAX) {
    throw std::overflow_error(std::to_string(value) + " does not fit 32 bits");
  }
  return static_cast<int32_t>(value);
}

inline void Require(bool holds, const char* invariant) {
  if (!holds) throw BrokenInvariant(invariant);
}

}  // namespace triptych
