// Twin of engine_core/block_pool.py; the contract is documented there.
#pragma once

#include <cstdint>
#include <vector>

namespace triptych {

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  std::vector<int32_t> Allocate(int32_t count);  // throws OutOfBlocks
  void AllocateInto(int32_t count, std::vector<int32_t>* blocks);
  void Retain(int32_t block);
  void Release(int32_t block);

  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return num_free_; }
  int32_t References(int32_t block) const;
  std::vector<int32_t> FreeBlocks() const;
  void Check() const;

 private:
  void RequireHeld(int32_t block) const;

  int32_t num_blocks_;
  int32_t num_free_;
  std::vector<int32_t> references_;
  // The free list in eviction order; entry num_blocks_ is its ends.
  std::vector<int32_t> next_;
  std::vector<int32_t> previous_;
};

}  // namespace triptych
