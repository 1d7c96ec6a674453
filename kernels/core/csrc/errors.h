// What the twins throw; bindings.cpp gives each the Python type that its plain twin raises.
#pragma once

#include <stdexcept>

namespace triptych {

// Fewer blocks are free than were asked for; nothing was taken.
struct OutOfBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A caller broke the contract, or the structure is damaged (AssertionError).
struct BrokenInvariant : std::logic_error {
  using std::logic_error::logic_error;
};

// No such open sequence (KeyError).
struct UnknownSequence : std::out_of_range {
  using std::out_of_range::out_of_range;
};

}  // namespace triptych
