#include "kv_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "errors.h"

namespace triptych {

KvCache::KvCache(std::shared_ptr<BlockPool> pool, int32_t block_size)
    : pool_(std::move(pool)), block_size_(block_size) {
  if (block_size < 1) {
    throw std::invalid_argument("block_size: " + std::to_string(block_size) + " is below 1");
  }
}

bool KvCache::Reserve(int64_t sequence_id, int64_t num_tokens) {
  const auto found = tables_.find(sequence_id);
  const int64_t held = found == tables_.end() ? 0 : static_cast<int64_t>(found->second.size());
  const int64_t missing = (num_tokens + block_size_ - 1) / block_size_ - held;
  if (missing > pool_->num_free()) return false;
  if (missing > 0) {
    auto& table = found == tables_.end() ? tables_[sequence_id] : found->second;
    pool_->AllocateInto(static_cast<int32_t>(missing), &table);
  }
  return true;
}

size_t KvCache::ReserveRows(const std::vector<Row>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!Reserve(rows[i].sequence_id, rows[i].start + rows[i].num_tokens)) return i;
  }
  return rows.size();
}

void KvCache::Release(int64_t sequence_id) {
  const auto found = tables_.find(sequence_id);
  if (found == tables_.end()) return;
  const auto& table = found->second;
  std::for_each(table.rbegin(), table.rend(), [this](int32_t block) { pool_->Release(block); });
  tables_.erase(found);
}

const std::vector<int32_t>& KvCache::Table(int64_t sequence_id) const {
  static const std::vector<int32_t> kEmpty;
  const auto found = tables_.find(sequence_id);
  return found == tables_.end() ? kEmpty : found->second;
}

std::vector<int64_t> KvCache::SequenceIds() const {
  std::vector<int64_t> ids;
  ids.reserve(tables_.size());
  for (const auto& entry : tables_) ids.push_back(entry.first);
  std::sort(ids.begin(), ids.end());
  return ids;
}

void KvCache::Check() const {
  pool_->Check();
  std::vector<int32_t> counted(pool_->num_blocks(), 0);
  for (const auto& entry : tables_) {
    if (entry.second.empty()) throw BrokenInvariant("kv_cache: a table is empty");
    auto sorted = entry.second;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      throw BrokenInvariant("kv_cache: a table names a block twice");
    }
    for (const int32_t block : sorted) ++counted[block];
  }
  for (int32_t block = 0; block < pool_->num_blocks(); ++block) {
    if (counted[block] != pool_->References(block)) {
      throw BrokenInvariant("kv_cache: block " + std::to_string(block) + " is miscounted");
    }
  }
}

}  // namespace triptych
