// A slot of the step ring, as engine_core/layout.py StepLayout computes it: extents, and the byte
// offset of each int32 array from the slot's start.
#pragma once

#include <cstddef>
#include <cstdint>

namespace triptych {

struct SlotLayout {
  size_t max_tokens;
  size_t max_rows;
  size_t max_blocks_per_row;
  size_t max_logits;
  size_t max_transfers;
  size_t slot_bytes;
  size_t token_ids;
  size_t positions;
  size_t slots;
  size_t row_starts;
  size_t kv_lengths;
  size_t logits_tokens;
  size_t copy_sources;
  size_t copy_targets;
  size_t block_tables;
  size_t store_sources;
  size_t store_targets;
  size_t load_sources;
  size_t load_targets;
};

// engine_core/layout.py PREVIOUS_SAMPLE
constexpr int32_t kPreviousSample = -2;

// engine_core/layout.py STEP_HEADER
struct StepHeader {
  uint64_t step_id;
  uint32_t num_tokens;
  uint32_t num_rows;
  uint32_t num_logits;
  uint32_t num_copies;
};
static_assert(sizeof(StepHeader) == 24, "STEP_HEADER has no padding");

// engine_core/layout.py DEVICE_HEADER, behind the StepHeader.
struct DeviceHeader {
  uint32_t num_stores;
  uint32_t num_loads;
  uint32_t num_samples;
  uint32_t num_history;
  uint32_t num_host_logits;
  uint32_t vocabulary_size;
};
static_assert(sizeof(DeviceHeader) == 24, "DEVICE_HEADER has no padding");

}  // namespace triptych
