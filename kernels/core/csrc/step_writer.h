// Twin of engine_core/step_writer.py; the contract is documented there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kv_cache.h"
#include "row.h"

namespace triptych {

// A slot of the step ring, as engine_core/layout.py StepLayout computes it: extents, and the byte
// offset of each int32 array from the slot's start.
struct SlotLayout {
  size_t max_tokens;
  size_t max_rows;
  size_t max_blocks_per_row;
  size_t slot_bytes;
  size_t token_ids;
  size_t positions;
  size_t slots;
  size_t row_starts;
  size_t kv_lengths;
  size_t logits_rows;
  size_t block_tables;
};

class StepWriter {
 public:
  StepWriter(std::shared_ptr<KvCache> kv_cache, const SlotLayout& layout);

  void Open(int64_t sequence_id, std::vector<int32_t> token_ids);
  void Append(const std::vector<int64_t>& sequence_ids, const std::vector<int32_t>& token_ids);
  void Close(int64_t sequence_id);
  const std::vector<int32_t>& TokenIds(int64_t sequence_id) const;
  std::vector<int64_t> SequenceIds() const;

  // `slot` has `slot_bytes` writable bytes, aligned to 8.
  void Write(std::byte* slot, size_t slot_bytes, uint64_t step_id, const std::vector<Row>& rows);

 private:
  struct Source {
    const std::vector<int32_t>* tokens;
    const std::vector<int32_t>* table;
  };

  size_t FindSources(const std::vector<Row>& rows);
  std::vector<int32_t>& Tokens(int64_t sequence_id);

  std::shared_ptr<KvCache> kv_cache_;
  SlotLayout layout_;
  std::unordered_map<int64_t, std::vector<int32_t>> tokens_;
  std::vector<Source> sources_;  // of the rows being written; a member to keep its memory
};

}  // namespace triptych
