// Twin of engine_core/slot_writer.py: a planned step into a slot of the step ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planned_step.h"
#include "slot_layout.h"

namespace triptych {

// What is moved before a step computes.
struct Moves {
  const Copies& copies;
  const Pairs& stores;
  const Pairs& loads;
};

class SlotWriter {
 public:
  SlotWriter(const SlotLayout& layout, int32_t block_size)
      : layout_(layout), block_size_(block_size) {}

  // `slot` has `slot_bytes` writable bytes, aligned to 8. Throws std::invalid_argument, with
  // nothing written, when the step exceeds the layout.
  void Write(std::byte* slot, size_t slot_bytes, uint64_t step_id, const PlannedStep& step,
             const Moves& moves);

 private:
  // What a row of a slot's block_tables was last filled with.
  struct TableImage {
    uint64_t version = 0;
    int32_t num_blocks = 0;
  };
  struct SlotImage {
    const std::byte* slot = nullptr;
    StepHeader header{};  // of the step that was written last
    std::vector<TableImage> rows;
  };

  void Check(size_t slot_bytes, const PlannedStep& step, const Moves& moves) const;
  SlotImage* ImageOf(std::byte* slot);
  void WriteTable(const BlockTable& table, int32_t* entries, TableImage* image) const;

  SlotLayout layout_;
  int32_t block_size_;
  std::vector<SlotImage> images_;
  size_t next_image_ = 0;
};

}  // namespace triptych
