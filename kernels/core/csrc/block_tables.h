// Twin of engine_core/block_tables.py; the contract is documented there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "prefix_cache.h"
#include "transfers.h"

namespace triptych {

// A sequence's blocks in token order. Two tables of one version and length are equal: it is another
// one whenever a table is made, a block in it replaced or dropped, and stays when blocks are added.
struct BlockTable {
  std::vector<int32_t> blocks;
  uint64_t version = 0;
};

using Copies = std::vector<std::pair<int32_t, int32_t>>;  // (target, source)

// A text's whole block number `place` is in host memory; `digests`: its parent's and its own.
struct HostHit {
  int32_t place;
  int32_t block;
  const Digest* digests;
  const int32_t* tokens;
};

// Whole blocks of the device, and of host memory, then `copied` tokens of block `source` (-1 and 0
// for none).
struct Hit {
  std::vector<int32_t> blocks;
  std::vector<HostHit> loads;
  int32_t source = -1;
  int32_t copied = 0;

  size_t num_whole() const { return blocks.size() + loads.size(); }
};

class BlockTables {
 public:
  BlockTables(int32_t num_blocks, int32_t block_size, int32_t num_host_blocks,
              size_t max_transfers);

  int32_t BlocksFor(int32_t num_tokens) const {
    return num_tokens == 0 ? 0 : (num_tokens - 1) / block_size_ + 1;
  }

  // False, and nothing taken, where fewer than `spare` blocks would be left free.
  bool Open(int32_t num_tokens, const Hit& hit, int64_t spare, BlockTable* table);
  void Share(const BlockTable& from, BlockTable* table);
  bool Prepare(BlockTable* table, int32_t num_tokens, int32_t start, int32_t end);
  // Fresh blocks that Prepare would take now.
  int32_t NumWanted(const BlockTable& table, int32_t num_tokens, int32_t start, int32_t end) const {
    return Growth(table, num_tokens) + NumShared(table, start, end);
  }
  // Whether a copy or a load into one of the blocks is due.
  bool Awaits(const BlockTable& table) const;
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
  void FinishCopies(const Copies& made);
  void ForgetAll();

  // Due copies as (target, source), in order.
  const Copies& copies() const { return copies_; }
  BlockPool& pool() { return pool_; }
  const BlockPool& pool() const { return pool_; }
  Transfers* transfers() { return transfers_.get(); }  // nullptr: there is no host memory
  const Transfers* transfers() const { return transfers_.get(); }
  PrefixCache& cache() { return cache_; }
  const PrefixCache& cache() const { return cache_; }
  int32_t block_size() const { return block_size_; }
  void Check(const std::vector<const BlockTable*>& tables) const;

 private:
  void TakeFresh(int32_t count, std::vector<int32_t>* blocks);  // adds them
  int32_t Growth(const BlockTable& table, int32_t num_tokens) const {
    return std::max(0, BlocksFor(num_tokens) - static_cast<int32_t>(table.blocks.size()));
  }
  int32_t NumShared(const BlockTable& table, int32_t start, int32_t end) const;
  void Store(const std::vector<int32_t>& blocks, size_t first);
  void Shorten(BlockTable* table, int32_t num_tokens);
  void AddCopy(int32_t target, int32_t source);
  void ReleaseBlock(int32_t block);
  bool GiveBack(int32_t block);
  // How many tables have the block.
  int32_t Holders(int32_t block) const { return pool_.References(block) - pins_[block]; }

  int32_t block_size_;
  BlockPool pool_;
  PrefixCache cache_;
  std::unique_ptr<Transfers> transfers_;
  Copies copies_;
  std::vector<int32_t> pins_;       // by block: of how many due copies it is the source
  std::vector<uint8_t> is_target_;  // by block
  uint64_t next_version_ = 1;
};

}  // namespace triptych
