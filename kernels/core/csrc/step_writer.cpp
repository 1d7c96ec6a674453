#include "step_writer.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "errors.h"

namespace triptych {
namespace {

// engine_core/layout.py STEP_HEADER
struct StepHeader {
  uint64_t step_id;
  uint32_t num_tokens;
  uint32_t num_rows;
  uint32_t num_samples;
  uint32_t reserved;
};
static_assert(sizeof(StepHeader) == 24, "STEP_HEADER has no padding");

int32_t* ArrayAt(std::byte* slot, size_t offset) {
  return reinterpret_cast<int32_t*>(slot + offset);
}

}  // namespace

StepWriter::StepWriter(std::shared_ptr<KvCache> kv_cache, const SlotLayout& layout)
    : kv_cache_(std::move(kv_cache)), layout_(layout) {}

void StepWriter::Open(int64_t sequence_id, std::vector<int32_t> token_ids) {
  if (!tokens_.emplace(sequence_id, std::move(token_ids)).second) {
    throw BrokenInvariant("writer: sequence " + std::to_string(sequence_id) + " is open");
  }
}

void StepWriter::Append(const std::vector<int64_t>& sequence_ids,
                        const std::vector<int32_t>& token_ids) {
  if (sequence_ids.size() != token_ids.size()) {
    throw std::invalid_argument("token_ids: not one for each sequence");
  }
  for (size_t i = 0; i < sequence_ids.size(); ++i) Tokens(sequence_ids[i]).push_back(token_ids[i]);
}

void StepWriter::Close(int64_t sequence_id) {
  if (tokens_.erase(sequence_id) == 0) throw UnknownSequence(std::to_string(sequence_id));
}

const std::vector<int32_t>& StepWriter::TokenIds(int64_t sequence_id) const {
  const auto found = tokens_.find(sequence_id);
  if (found == tokens_.end()) throw UnknownSequence(std::to_string(sequence_id));
  return found->second;
}

std::vector<int32_t>& StepWriter::Tokens(int64_t sequence_id) {
  return const_cast<std::vector<int32_t>&>(TokenIds(sequence_id));
}

std::vector<int64_t> StepWriter::SequenceIds() const {
  std::vector<int64_t> ids;
  ids.reserve(tokens_.size());
  for (const auto& entry : tokens_) ids.push_back(entry.first);
  std::sort(ids.begin(), ids.end());
  return ids;
}

// Looks every row up once and checks all of them before a byte is written; returns the number of
// tokens.
size_t StepWriter::FindSources(const std::vector<Row>& rows) {
  const auto block_size = static_cast<int64_t>(kv_cache_->block_size());
  int64_t num_tokens = 0;
  for (const Row& row : rows) num_tokens += row.num_tokens;
  if (rows.size() > layout_.max_rows || num_tokens > static_cast<int64_t>(layout_.max_tokens)) {
    throw std::invalid_argument("rows: " + std::to_string(rows.size()) + " rows of " +
                                std::to_string(num_tokens) + " tokens, the layout has " +
                                std::to_string(layout_.max_rows) + " of " +
                                std::to_string(layout_.max_tokens));
  }
  sources_.clear();
  for (const Row& row : rows) {
    const auto& tokens = TokenIds(row.sequence_id);
    const int64_t end = row.start + row.num_tokens;
    if (row.start < 0 || row.num_tokens < 1 || end > static_cast<int64_t>(tokens.size())) {
      throw std::invalid_argument("rows: tokens " + std::to_string(row.start) + " to " +
                                  std::to_string(end) + " of sequence " +
                                  std::to_string(row.sequence_id) + ", which has " +
                                  std::to_string(tokens.size()));
    }
    const auto& table = kv_cache_->Table(row.sequence_id);
    if (table.size() > layout_.max_blocks_per_row ||
        static_cast<int64_t>(table.size()) * block_size < end) {
      throw std::invalid_argument("rows: " + std::to_string(table.size()) + " blocks of sequence " +
                                  std::to_string(row.sequence_id) + " for " + std::to_string(end) +
                                  " tokens, the layout has " +
                                  std::to_string(layout_.max_blocks_per_row));
    }
    sources_.push_back({&tokens, &table});
  }
  return static_cast<size_t>(num_tokens);
}

void StepWriter::Write(std::byte* slot, size_t slot_bytes, uint64_t step_id,
                       const std::vector<Row>& rows) {
  if (slot_bytes < layout_.slot_bytes) {
    throw std::invalid_argument("slot: " + std::to_string(slot_bytes) + " bytes, the layout has " +
                                std::to_string(layout_.slot_bytes));
  }
  const size_t num_tokens = FindSources(rows);
  int32_t* token_ids = ArrayAt(slot, layout_.token_ids);
  int32_t* positions = ArrayAt(slot, layout_.positions);
  int32_t* slots = ArrayAt(slot, layout_.slots);
  int32_t* row_starts = ArrayAt(slot, layout_.row_starts);
  int32_t* kv_lengths = ArrayAt(slot, layout_.kv_lengths);
  int32_t* logits_rows = ArrayAt(slot, layout_.logits_rows);
  int32_t* block_tables = ArrayAt(slot, layout_.block_tables);

  const int32_t block_size = kv_cache_->block_size();
  int32_t written = 0, num_samples = 0;
  row_starts[0] = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto start = static_cast<int32_t>(rows[r].start);
    const auto end = start + static_cast<int32_t>(rows[r].num_tokens);
    const int32_t* tokens = sources_[r].tokens->data();
    const std::vector<int32_t>& table = *sources_[r].table;
    for (int32_t t = start; t < end; ++t, ++written) {
      token_ids[written] = tokens[t];
      positions[written] = t;
      slots[written] = table[t / block_size] * block_size + t % block_size;
    }
    row_starts[r + 1] = written;
    kv_lengths[r] = end;
    logits_rows[r] = rows[r].samples ? num_samples++ : -1;
    int32_t* entry = block_tables + r * layout_.max_blocks_per_row;
    std::fill(std::copy(table.begin(), table.end(), entry), entry + layout_.max_blocks_per_row, -1);
  }
  const StepHeader header{step_id, static_cast<uint32_t>(num_tokens),
                          static_cast<uint32_t>(rows.size()), static_cast<uint32_t>(num_samples),
                          0};
  std::memcpy(slot, &header, sizeof(header));
}

}  // namespace triptych
