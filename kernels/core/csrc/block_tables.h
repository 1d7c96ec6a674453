// Twin of engine_core/block_tables.py; the contract is documented there.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "prefix_cache.h"

namespace triptych {

// A sequence's blocks in token order. Two tables of one version and length are equal: it is another
// one whenever a table is made, a block in it replaced or dropped, and stays when blocks are added.
struct BlockTable {
  std::vector<int32_t> blocks;
  uint64_t version = 0;
};

// Whole blocks, then `copied` tokens of block `source` (-1 and 0 for none).
struct Hit {
  std::vector<int32_t> blocks;
  int32_t source = -1;
  int32_t copied = 0;
};

class BlockTables {
 public:
  BlockTables(int32_t num_blocks, int32_t block_size);

  int32_t BlocksFor(int32_t num_tokens) const {
    return num_tokens == 0 ? 0 : (num_tokens - 1) / block_size_ + 1;
  }

  // False, and nothing taken, where fewer than `spare` blocks would be left free.
  bool Open(int32_t num_tokens, const Hit& hit, int64_t spare, BlockTable* table);
  void Share(const BlockTable& from, BlockTable* table);
  bool Prepare(BlockTable* table, int32_t num_tokens, int32_t start, int32_t end);
  // Adds blocks for `num_tokens` tokens, as far as some are free. Returns how many of them have
  // room.
  int32_t Extend(BlockTable* table, int32_t num_tokens);
  // Gives back the blocks, last one first, that `num_tokens` tokens do not need.
  void Trim(BlockTable* table, int32_t num_tokens) {
    if (static_cast<int64_t>(table->blocks.size() - 1) * block_size_ >= num_tokens) {
      Shorten(table, num_tokens);
    }
  }

  void KeepPartial(const BlockTable& table, int32_t num_computed, const Digest& parent,
                   const int32_t* tokens);
  void Release(const BlockTable& table);
  void FinishCopies();

  // Due copies as (target, source), in order.
  const std::vector<std::pair<int32_t, int32_t>>& copies() const { return copies_; }
  BlockPool& pool() { return pool_; }
  const BlockPool& pool() const { return pool_; }
  PrefixCache& cache() { return cache_; }
  const PrefixCache& cache() const { return cache_; }
  int32_t block_size() const { return block_size_; }
  void Check(const std::vector<const BlockTable*>& tables) const;

 private:
  int32_t TakeFresh();
  void Shorten(BlockTable* table, int32_t num_tokens);
  void AddCopy(int32_t target, int32_t source);
  void ReleaseBlock(int32_t block);
  // How many tables have the block.
  int32_t Holders(int32_t block) const { return pool_.References(block) - pins_[block]; }

  int32_t block_size_;
  BlockPool pool_;
  PrefixCache cache_;
  std::vector<std::pair<int32_t, int32_t>> copies_;
  std::vector<int32_t> pins_;       // by block: of how many due copies it is the source
  std::vector<uint8_t> is_target_;  // by block
  uint64_t next_version_ = 1;
};

}  // namespace triptych
