#include "block_pool.h"

#include <string>

#include "errors.h"

namespace triptych {

BlockPool::BlockPool(int32_t num_blocks) : num_blocks_(num_blocks), num_free_(num_blocks) {
  if (num_blocks < 1) {
    throw std::invalid_argument("num_blocks: " + std::to_string(num_blocks) + " is below 1");
  }
  references_.assign(num_blocks, 0);
  next_.resize(static_cast<size_t>(num_blocks) + 1);
  previous_.resize(static_cast<size_t>(num_blocks) + 1);
  for (int32_t i = 0; i <= num_blocks; ++i) {
    next_[i] = i == num_blocks ? 0 : i + 1;
    previous_[i] = i == 0 ? num_blocks : i - 1;
  }
}

int32_t BlockPool::Allocate() {
  if (num_free_ == 0) throw BrokenInvariant("pool: no block is free");
  const int32_t block = next_[num_blocks_];
  Unlink(block);
  references_[block] = 1;
  --num_free_;
  return block;
}

void BlockPool::Retain(int32_t block) {
  if (references_[block] == 0) {
    Unlink(block);
    --num_free_;
  }
  ++references_[block];
}

bool BlockPool::Release(int32_t block, bool to_front) {
  if (references_[block] <= 0) {
    throw BrokenInvariant("pool: block " + std::to_string(block) + " is not held");
  }
  if (--references_[block] > 0) return false;
  if (to_front) {
    Link(block, num_blocks_, next_[num_blocks_]);
  } else {
    Link(block, previous_[num_blocks_], num_blocks_);
  }
  ++num_free_;
  return true;
}

void BlockPool::Unlink(int32_t block) {
  const int32_t before = previous_[block], after = next_[block];
  next_[before] = after;
  previous_[after] = before;
}

void BlockPool::Link(int32_t block, int32_t before, int32_t after) {
  next_[before] = previous_[after] = block;
  previous_[block] = before;
  next_[block] = after;
}

std::vector<int32_t> BlockPool::FreeBlocks() const {
  std::vector<int32_t> blocks;
  for (int32_t block = next_[num_blocks_];
       block != num_blocks_ && blocks.size() <= static_cast<size_t>(num_blocks_);
       block = next_[block]) {
    blocks.push_back(block);
  }
  return blocks;
}

void BlockPool::Check() const {
  const std::vector<int32_t> free = FreeBlocks();
  Require(free.size() == static_cast<size_t>(num_free_),
          "pool: num_free is not the length of the free list");
  int32_t before = num_blocks_;
  for (const int32_t block : free) {
    Require(references_[block] == 0, "pool: a held block is in the free list");
    Require(previous_[block] == before, "pool: the free list differs when read backwards");
    before = block;
  }
  Require(previous_[num_blocks_] == before, "pool: the free list differs when read backwards");
  int32_t unheld = 0;
  for (const int32_t references : references_) {
    Require(references >= 0, "pool: a reference count is negative");
    unheld += references == 0;
  }
  Require(unheld == num_free_, "pool: the free list is not the set of unheld blocks");
}

}  // namespace triptych
