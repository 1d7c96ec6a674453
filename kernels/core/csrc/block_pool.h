// Twin of engine_core/block_pool.py; the contract is documented there.
#pragma once

#include <cstdint>
#include <vector>

namespace triptych {

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t Allocate();  // from the front; the caller knows that a block is free
  void Retain(int32_t block);
  bool Release(int32_t block, bool to_front);  // whether it is free now

  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return num_free_; }
  int32_t References(int32_t block) const { return references_[block]; }
  std::vector<int32_t> FreeBlocks() const;
  void Check() const;

 private:
  void Unlink(int32_t block);
  void Link(int32_t block, int32_t before, int32_t after);

  int32_t num_blocks_;
  int32_t num_free_;
  std::vector<int32_t> references_;
  // The free list in the order of being taken; entry num_blocks_ is its ends.
  std::vector<int32_t> next_;
  std::vector<int32_t> previous_;
};

}  // namespace triptych
