// Twin of engine_core/prefix_cache.py; the contract is documented there.
#pragma once

#include <cstdint>
#include <vector>

#include "blake2b.h"
#include "digest_map.h"

namespace triptych {

// A block whose first `num_tokens` tokens are the wanted ones; block -1 where there is none.
struct PartialHit {
  int32_t block;
  int32_t num_tokens;
};

// What a whole block holds.
struct BlockText {
  Digest parent;
  Digest digest;
  std::vector<int32_t> tokens;
};

// The digest of a block behind the one with digest `parent`.
Digest BlockDigest(const Digest& parent, const int32_t* tokens, size_t count);

class PrefixCache {
 public:
  PrefixCache(int32_t num_blocks, int32_t block_size);

  // The full block of these tokens behind `parent`, or -1.
  int32_t FindFull(const Digest& digest, const Digest& parent, const int32_t* tokens) const;
  // Among the children of `parent`, the one that shares the longest beginning with the text.
  PartialHit FindPartial(const Digest& parent, const int32_t* tokens, int64_t count) const;

  // Each is false, and nothing changes, where what the block has can be found already.
  bool AddFull(int32_t block, const Digest& digest, const Digest& parent, const int32_t* tokens);
  bool AddPartial(int32_t block, const Digest& parent, const int32_t* tokens, int32_t count);
  void Forget(int32_t block);
  void Clear();

  bool Has(int32_t block) const { return entries_[block].count > 0; }
  bool IsFull(int32_t block) const { return entries_[block].count == block_size_; }
  BlockText TextOf(int32_t block) const {  // of a full one
    const Entry& entry = entries_[block];
    return {entry.parent, entry.digest, {Tokens(block), Tokens(block) + block_size_}};
  }
  int32_t size() const { return size_; }
  void Check() const;

 private:
  // Children of one parent form a list, the most recently added first. No memory of its own:
  // blocks come and go in every step.
  struct Entry {
    Digest parent;
    Digest digest;      // of a full block
    int32_t count = 0;  // tokens; 0: the block cannot be found
    int32_t next = -1;
    int32_t previous = -1;
  };

  const int32_t* Tokens(int32_t block) const {
    return tokens_.data() + static_cast<size_t>(block) * block_size_;
  }
  int32_t CommonTokens(int32_t block, const int32_t* tokens, int64_t count) const;
  void Link(int32_t block, const Digest& parent, const int32_t* tokens, int32_t count);

  int32_t block_size_;
  int32_t size_ = 0;
  std::vector<Entry> entries_;   // by block
  std::vector<int32_t> tokens_;  // [num_blocks, block_size]
  DigestMap full_;
  DigestMap first_child_;
};

}  // namespace triptych
