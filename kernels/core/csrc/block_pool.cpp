#include "block_pool.h"

#include <string>

#include "errors.h"

namespace triptych {

BlockPool::BlockPool(int32_t num_blocks) : num_blocks_(num_blocks), num_free_(num_blocks) {
  if (num_blocks < 1) {
    throw std::invalid_argument("num_blocks: " + std::to_string(num_blocks) + " is below 1");
  }
  references_.assign(num_blocks, 0);
  next_.resize(num_blocks + 1);
  previous_.resize(num_blocks + 1);
  for (int32_t i = 0; i <= num_blocks; ++i) {
    next_[i] = i == num_blocks ? 0 : i + 1;
    previous_[i] = i == 0 ? num_blocks : i - 1;
  }
}

std::vector<int32_t> BlockPool::Allocate(int32_t count) {
  std::vector<int32_t> blocks;
  AllocateInto(count, &blocks);
  return blocks;
}

void BlockPool::AllocateInto(int32_t count, std::vector<int32_t>* blocks) {
  if (count < 0) throw BrokenInvariant("count: " + std::to_string(count) + " is below 0");
  if (count > num_free_) {
    throw OutOfBlocks(std::to_string(count) + " blocks asked for, " + std::to_string(num_free_) +
                      " of " + std::to_string(num_blocks_) + " free");
  }
  for (int32_t i = 0; i < count; ++i) {
    const int32_t block = next_[num_blocks_];
    const int32_t after = next_[block];
    next_[num_blocks_] = after;
    previous_[after] = num_blocks_;
    references_[block] = 1;
    blocks->push_back(block);
  }
  num_free_ -= count;
}

void BlockPool::Retain(int32_t block) {
  RequireHeld(block);
  ++references_[block];
}

void BlockPool::Release(int32_t block) {
  RequireHeld(block);
  if (--references_[block] > 0) return;
  const int32_t last = previous_[num_blocks_];
  next_[last] = previous_[num_blocks_] = block;
  previous_[block] = last;
  next_[block] = num_blocks_;
  ++num_free_;
}

int32_t BlockPool::References(int32_t block) const {
  if (block < 0 || block >= num_blocks_) throw std::out_of_range("no such block");
  return references_[block];
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
  if (free.size() != static_cast<size_t>(num_free_)) {
    throw BrokenInvariant("pool: num_free is not the length of the free list");
  }
  int32_t before = num_blocks_;
  for (const int32_t block : free) {
    if (references_[block] != 0) throw BrokenInvariant("pool: a held block is in the free list");
    if (previous_[block] != before) {
      throw BrokenInvariant("pool: the free list differs when read backwards");
    }
    before = block;
  }
  if (previous_[num_blocks_] != before) {
    throw BrokenInvariant("pool: the free list differs when read backwards");
  }
  int32_t unheld = 0;
  for (const int32_t references : references_) {
    if (references < 0) throw BrokenInvariant("pool: a reference count is negative");
    unheld += references == 0;
  }
  if (unheld != num_free_) {
    throw BrokenInvariant("pool: the free list is not the set of unheld blocks");
  }
}

void BlockPool::RequireHeld(int32_t block) const {
  if (block < 0 || block >= num_blocks_ || references_[block] <= 0) {
    throw BrokenInvariant("pool: block " + std::to_string(block) + " is not held");
  }
}

}  // namespace triptych
