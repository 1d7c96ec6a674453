#include "block_tables.h"

#include <algorithm>
#include <string>

#include "errors.h"

namespace triptych {
namespace {

int32_t CheckedBlockSize(int32_t block_size) {
  if (block_size < 1) {
    throw std::invalid_argument("block_size: " + std::to_string(block_size) + " is below 1");
  }
  return block_size;
}

}  // namespace

BlockTables::BlockTables(int32_t num_blocks, int32_t block_size)
    : block_size_(CheckedBlockSize(block_size)),
      pool_(num_blocks),
      cache_(num_blocks, block_size),
      pins_(num_blocks),
      is_target_(num_blocks) {}

bool BlockTables::Open(int32_t num_tokens, const Hit& hit, int64_t spare, BlockTable* table) {
  const int32_t fresh = BlocksFor(num_tokens) - static_cast<int32_t>(hit.blocks.size());
  const auto is_free = [this](int32_t block) { return pool_.References(block) == 0; };
  const auto taken = std::count_if(hit.blocks.begin(), hit.blocks.end(), is_free) +
                     (hit.source >= 0 && is_free(hit.source));
  if (pool_.num_free() - taken - fresh < std::max<int64_t>(spare, 0)) return false;
  table->blocks.reserve(hit.blocks.size() + fresh + 1);
  for (const int32_t block : hit.blocks) {
    pool_.Retain(block);
    table->blocks.push_back(block);
  }
  if (hit.source >= 0) pool_.Retain(hit.source);
  for (int32_t i = 0; i < fresh; ++i) table->blocks.push_back(TakeFresh());
  if (hit.source >= 0) AddCopy(table->blocks[hit.blocks.size()], hit.source);
  table->version = next_version_++;
  return true;
}

void BlockTables::Share(const BlockTable& from, BlockTable* table) {
  for (const int32_t block : from.blocks) pool_.Retain(block);
  table->blocks = from.blocks;
  table->version = next_version_++;
}

bool BlockTables::Prepare(BlockTable* table, int32_t num_tokens, int32_t start, int32_t end) {
  auto& blocks = table->blocks;
  const auto held = static_cast<int32_t>(blocks.size());
  const int32_t growth = BlocksFor(num_tokens) - held;
  const int32_t first = start / block_size_, last = std::min(BlocksFor(end), held);
  int32_t shared = 0;
  for (int32_t i = first; i < last; ++i) shared += Holders(blocks[i]) > 1;
  if (growth <= 0 && shared == 0) return true;
  if (growth + shared > pool_.num_free()) return false;
  for (int32_t i = 0; i < growth; ++i) blocks.push_back(TakeFresh());
  for (int32_t i = first; shared > 0 && i < last; ++i) {
    const int32_t old = blocks[i];
    if (Holders(old) == 1) continue;
    blocks[i] = TakeFresh();
    table->version = next_version_++;
    if (start > i * block_size_) {
      pool_.Retain(old);
      AddCopy(blocks[i], old);
    }
    ReleaseBlock(old);
    --shared;
  }
  return true;
}

int32_t BlockTables::Extend(BlockTable* table, int32_t num_tokens) {
  const int32_t wanted = BlocksFor(num_tokens) - static_cast<int32_t>(table->blocks.size());
  const int32_t taken = std::min(wanted, pool_.num_free());
  for (int32_t i = 0; i < taken; ++i) table->blocks.push_back(TakeFresh());
  return std::min(num_tokens, static_cast<int32_t>(table->blocks.size()) * block_size_);
}

void BlockTables::Shorten(BlockTable* table, int32_t num_tokens) {
  const auto needed = static_cast<size_t>(BlocksFor(num_tokens));
  for (; table->blocks.size() > needed; table->blocks.pop_back()) {
    ReleaseBlock(table->blocks.back());
  }
  table->version = next_version_++;
}

int32_t BlockTables::TakeFresh() {
  const int32_t block = pool_.Allocate();
  cache_.Forget(block);
  return block;
}

// The caller has retained the source.
void BlockTables::AddCopy(int32_t target, int32_t source) {
  copies_.emplace_back(target, source);
  is_target_[target] = 1;
  ++pins_[source];
}

void BlockTables::KeepPartial(const BlockTable& table, int32_t num_computed, const Digest& parent,
                              const int32_t* tokens) {
  const int32_t block = table.blocks[num_computed / block_size_];
  if (pool_.References(block) == 1 && !is_target_[block]) {
    cache_.AddPartial(block, parent, tokens, num_computed % block_size_);
  }
}

void BlockTables::Release(const BlockTable& table) {
  // Last block first: the end of a text is to be forgotten before its beginning.
  std::for_each(table.blocks.rbegin(), table.blocks.rend(),
                [this](int32_t block) { ReleaseBlock(block); });
}

void BlockTables::ReleaseBlock(int32_t block) {
  // A loop: nobody has use for a copy into a free block, so that its source may be free then, too.
  while (pool_.Release(block, !cache_.Has(block)) && is_target_[block]) {
    const auto copy = std::find_if(copies_.begin(), copies_.end(),
                                   [block](const auto& due) { return due.first == block; });
    is_target_[block] = 0;
    block = copy->second;
    --pins_[block];
    copies_.erase(copy);
  }
}

void BlockTables::FinishCopies() {
  if (copies_.empty()) return;
  std::vector<std::pair<int32_t, int32_t>> made;
  made.swap(copies_);
  for (const auto& [target, source] : made) {
    is_target_[target] = 0;
    --pins_[source];
  }
  for (const auto& copy : made) ReleaseBlock(copy.second);
}

void BlockTables::Check(const std::vector<const BlockTable*>& tables) const {
  pool_.Check();
  cache_.Check();
  std::vector<int32_t> held(pool_.num_blocks(), 0), pinned(pool_.num_blocks(), 0);
  for (const BlockTable* table : tables) {
    Require(!table->blocks.empty(), "tables: one is empty");
    auto sorted = table->blocks;
    std::sort(sorted.begin(), sorted.end());
    Require(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
            "tables: one names a block twice");
    for (const int32_t block : sorted) ++held[block];
  }
  for (const auto& [target, source] : copies_) {
    Require(target != source, "copies: one is to itself");
    Require(pool_.References(target) > 0, "copies: nobody has a target");
    Require(is_target_[target] && !cache_.Has(target), "copies: a target is findable or unknown");
    ++pinned[source];
  }
  for (int32_t block = 0; block < pool_.num_blocks(); ++block) {
    if (pool_.References(block) != held[block] + pinned[block]) {
      throw BrokenInvariant("tables: block " + std::to_string(block) + " is miscounted");
    }
    Require(pins_[block] == pinned[block], "copies: pins are not the sources");
  }
  Require(
      std::count(is_target_.begin(), is_target_.end(), 1) == static_cast<int64_t>(copies_.size()),
      "copies: a target has no copy");
}

}  // namespace triptych
