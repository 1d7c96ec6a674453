// Twin of engine_core/kv_cache.py; the contract is documented there.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "block_pool.h"
#include "row.h"

namespace triptych {

class KvCache {
 public:
  KvCache(std::shared_ptr<BlockPool> pool, int32_t block_size);

  bool Reserve(int64_t sequence_id, int64_t num_tokens);
  size_t ReserveRows(const std::vector<Row>& rows);
  void Release(int64_t sequence_id);

  // Safe until the next call that is not const.
  const std::vector<int32_t>& Table(int64_t sequence_id) const;
  std::vector<int64_t> SequenceIds() const;
  void Check() const;

  int32_t block_size() const { return block_size_; }
  int32_t num_blocks() const { return pool_->num_blocks(); }
  int32_t num_free_blocks() const { return pool_->num_free(); }

 private:
  std::shared_ptr<BlockPool> pool_;
  int32_t block_size_;
  std::unordered_map<int64_t, std::vector<int32_t>> tables_;
};

}  // namespace triptych
