#pragma once

#include <cstdint>

namespace triptych {

// One row of a step: compute tokens [start, start + num_tokens) of the sequence. The C++ side of
// engine_core's ScheduledSequence.
struct Row {
  int64_t sequence_id;
  int64_t start;
  int64_t num_tokens;
  bool samples;
};

}  // namespace triptych
