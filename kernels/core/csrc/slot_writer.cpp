#include "slot_writer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace triptych {
namespace {

constexpr size_t kMaxImages = 16;  // more than a ring has slots

int32_t* ArrayAt(std::byte* slot, size_t offset) {
  return reinterpret_cast<int32_t*>(slot + offset);
}

void WritePairs(const Pairs& pairs, int32_t* sources, int32_t* targets) {
  for (const auto& [source, target] : pairs) {
    *sources++ = source;
    *targets++ = target;
  }
}

void CheckExtent(const char* name, size_t count, size_t most) {
  if (count > most) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(count) +
                                ", the layout has " + std::to_string(most));
  }
}

}  // namespace

void SlotWriter::Check(size_t slot_bytes, const PlannedStep& step, const Moves& moves) const {
  if (slot_bytes < layout_.slot_bytes) {
    throw std::invalid_argument("slot: " + std::to_string(slot_bytes) + " bytes, the layout has " +
                                std::to_string(layout_.slot_bytes));
  }
  CheckExtent("rows", step.rows.size(), layout_.max_rows);
  CheckExtent("tokens", static_cast<size_t>(step.num_tokens), layout_.max_tokens);
  CheckExtent("logits", static_cast<size_t>(step.num_logits), layout_.max_logits);
  CheckExtent("copies", moves.copies.size(), layout_.max_rows);
  CheckExtent("stores", moves.stores.size(), layout_.max_transfers);
  CheckExtent("loads", moves.loads.size(), layout_.max_transfers);
  for (const Row& row : step.rows) {
    CheckExtent("blocks", row.sequence->table.blocks.size(), layout_.max_blocks_per_row);
  }
}

void SlotWriter::Write(std::byte* slot, size_t slot_bytes, uint64_t step_id,
                       const PlannedStep& step, const Moves& moves) {
  Check(slot_bytes, step, moves);
  int32_t* token_ids = ArrayAt(slot, layout_.token_ids);
  int32_t* positions = ArrayAt(slot, layout_.positions);
  int32_t* slots = ArrayAt(slot, layout_.slots);
  int32_t* row_starts = ArrayAt(slot, layout_.row_starts);
  int32_t* kv_lengths = ArrayAt(slot, layout_.kv_lengths);
  int32_t* logits_tokens = ArrayAt(slot, layout_.logits_tokens);
  int32_t* block_tables = ArrayAt(slot, layout_.block_tables);
  SlotImage* image = ImageOf(slot);

  row_starts[0] = 0;
  for (size_t r = 0; r < step.rows.size(); ++r) {
    const Row& row = step.rows[r];
    const int32_t* tokens = row.sequence->tokens.data();
    const int32_t* blocks = row.sequence->table.blocks.data();
    int32_t index = row.start / block_size_, offset = row.start % block_size_;
    int32_t t = row.start, i = row.first_token;
    const auto put = [&](int32_t token) {
      token_ids[i] = token;
      positions[i] = t++;
      slots[i++] = blocks[index] * block_size_ + offset;
      if (++offset == block_size_) {
        offset = 0;
        ++index;
      }
    };
    if (row.previous != kNoSample) put(kPreviousSample - row.previous);
    while (t < row.own_end()) put(tokens[t]);
    for (int32_t d = 0; d < row.num_drafts; ++d) put(step.drafts[row.first_draft + d]);
    row_starts[r + 1] = i;
    kv_lengths[r] = row.end();
    int32_t* logits = logits_tokens + row.first_logits;
    for (int32_t s = 0; s < row.num_scored; ++s) *logits++ = row.first_token + s;
    for (int32_t s = row.first_token + row.num_tokens - 1; row.samples && s < i; ++s) *logits++ = s;
    WriteTable(row.sequence->table, block_tables + r * layout_.max_blocks_per_row, &image->rows[r]);
  }
  int32_t* sources = ArrayAt(slot, layout_.copy_sources);
  int32_t* targets = ArrayAt(slot, layout_.copy_targets);
  for (const auto& [target, source] : moves.copies) {
    *sources++ = source;
    *targets++ = target;
  }
  const StepHeader header{
      step_id, static_cast<uint32_t>(step.num_tokens), static_cast<uint32_t>(step.rows.size()),
      static_cast<uint32_t>(step.num_logits), static_cast<uint32_t>(moves.copies.size())};
  std::memcpy(slot, &header, sizeof(header));
  WritePairs(moves.stores, ArrayAt(slot, layout_.store_sources),
             ArrayAt(slot, layout_.store_targets));
  WritePairs(moves.loads, ArrayAt(slot, layout_.load_sources), ArrayAt(slot, layout_.load_targets));
  DeviceHeader device_header{};
  device_header.num_stores = static_cast<uint32_t>(moves.stores.size());
  device_header.num_loads = static_cast<uint32_t>(moves.loads.size());
  std::memcpy(slot + sizeof(header), &device_header, sizeof(device_header));
  image->header = header;
}

// Most of a slot's bytes are block tables, and hardly any of them change from one step to the next.
// What is known of a slot holds only while it has the step that was written into it last: its
// memory may have been given to somebody else.
SlotWriter::SlotImage* SlotWriter::ImageOf(std::byte* slot) {
  StepHeader header;
  std::memcpy(&header, slot, sizeof(header));
  for (SlotImage& image : images_) {
    if (image.slot != slot) continue;
    const bool same = std::memcmp(&image.header, &header, sizeof(header)) == 0;
    // Step 0 is what zeroed memory has.
    if (!same || header.step_id == 0) image.rows.assign(layout_.max_rows, {});
    return &image;
  }
  if (images_.size() < kMaxImages) images_.emplace_back();
  SlotImage& image = images_[next_image_++ % kMaxImages];
  image = {slot, {}, std::vector<TableImage>(layout_.max_rows)};
  return &image;
}

void SlotWriter::WriteTable(const BlockTable& table, int32_t* entries, TableImage* image) const {
  const auto num_blocks = static_cast<int32_t>(table.blocks.size());
  const bool known = image->version == table.version;
  if (known && image->num_blocks == num_blocks) return;
  const int32_t from = known ? image->num_blocks : 0;
  std::copy(table.blocks.begin() + from, table.blocks.end(), entries + from);
  // Behind them it is -1 already, unless a longer table stood there or nobody knows what.
  const int32_t stale =
      image->version == 0 ? static_cast<int32_t>(layout_.max_blocks_per_row) : image->num_blocks;
  if (stale > num_blocks) std::fill(entries + num_blocks, entries + stale, -1);
  *image = {table.version, num_blocks};
}

}  // namespace triptych
