// Twin of engine_core/host_blocks.py; the contract is documented there.
#pragma once

#include <cstdint>
#include <vector>

#include "block_pool.h"
#include "prefix_cache.h"

namespace triptych {

class HostBlocks {
 public:
  HostBlocks(int32_t num_blocks, int32_t block_size)
      : pool_(num_blocks), cache_(num_blocks, block_size) {}

  int32_t num_blocks() const { return pool_.num_blocks(); }
  int32_t num_used() const { return cache_.size(); }
  // Block -1: there is none.
  int32_t Find(const Digest& parent, const Digest& digest, const int32_t* tokens) const {
    return cache_.FindFull(digest, parent, tokens);
  }

  bool Keeps(const BlockText& text);                    // then it counts as used just now
  int32_t BeginStore();                                 // -1: all are in use
  void EndStore(int32_t block, const BlockText* text);  // nullptr: it is not to be found
  void BeginLoad(int32_t block) { pool_.Retain(block); }
  void EndLoad(int32_t block) { GiveBack(block); }

  void Forget(const Digest& parent, const Digest& digest, const int32_t* tokens);
  void Clear();
  void Check(const std::vector<int32_t>& holders) const;

 private:
  void GiveBack(int32_t block) { pool_.Release(block, !cache_.Has(block)); }
  void Forget(int32_t block);

  BlockPool pool_;
  PrefixCache cache_;
};

}  // namespace triptych
