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

BlockTables::BlockTables(int32_t num_blocks, int32_t block_size, int32_t num_host_blocks,
                         size_t max_transfers)
    : block_size_(CheckedBlockSize(block_size)),
      pool_(num_blocks),
      cache_(num_blocks, block_size),
      pins_(num_blocks),
      is_target_(num_blocks) {
  if (num_host_blocks > 0) {
    transfers_ =
        std::make_unique<Transfers>(num_host_blocks, num_blocks, block_size, max_transfers);
  }
}

bool BlockTables::Open(int32_t num_tokens, const Hit& hit, int64_t spare, BlockTable* table) {
  const int32_t fresh = BlocksFor(num_tokens) - static_cast<int32_t>(hit.blocks.size());
  const auto is_free = [this](int32_t block) { return pool_.References(block) == 0; };
  const auto taken = std::count_if(hit.blocks.begin(), hit.blocks.end(), is_free) +
                     (hit.source >= 0 && is_free(hit.source));
  if (pool_.num_free() - taken - fresh < std::max<int64_t>(spare, 0)) return false;
  auto& blocks = table->blocks;
  blocks.reserve(hit.blocks.size() + fresh + 1);
  for (const int32_t block : hit.blocks) {
    pool_.Retain(block);
    blocks.push_back(block);
  }
  if (hit.source >= 0) pool_.Retain(hit.source);
  for (const HostHit& load : hit.loads) transfers_->host().BeginLoad(load.block);
  TakeFresh(fresh, &blocks);
  auto next = blocks.begin() + static_cast<std::ptrdiff_t>(hit.blocks.size());
  for (const HostHit& load : hit.loads) {  // to the next fresh block, which comes to its place
    transfers_->Load(load.block, *next);
    cache_.AddFull(*next, load.digests[1], load.digests[0], load.tokens);
    std::rotate(blocks.begin() + load.place, next, next + 1);
    ++next;
  }
  if (hit.source >= 0) AddCopy(*next, hit.source);
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
  const int32_t growth = Growth(*table, num_tokens);
  int32_t shared = NumShared(*table, start, end);
  if (growth == 0 && shared == 0) return true;
  if (growth + shared > pool_.num_free()) return false;
  TakeFresh(growth, &blocks);
  for (int32_t i = start / block_size_; shared > 0; ++i) {
    const int32_t old = blocks[i];
    if (Holders(old) == 1) continue;
    TakeFresh(1, &blocks);
    blocks[i] = blocks.back();
    blocks.pop_back();
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

int32_t BlockTables::NumShared(const BlockTable& table, int32_t start, int32_t end) const {
  const auto held = static_cast<int32_t>(table.blocks.size());
  const int32_t last = std::min(BlocksFor(end), held);
  int32_t shared = 0;
  for (int32_t i = start / block_size_; i < last; ++i) shared += Holders(table.blocks[i]) > 1;
  return shared;
}

bool BlockTables::Awaits(const BlockTable& table) const {
  if (transfers_ && transfers_->Awaits(table.blocks)) return true;
  return !copies_.empty() && std::any_of(table.blocks.begin(), table.blocks.end(),
                                         [this](int32_t block) { return is_target_[block] != 0; });
}

int32_t BlockTables::Extend(BlockTable* table, int32_t num_tokens) {
  const int32_t wanted = BlocksFor(num_tokens) - static_cast<int32_t>(table->blocks.size());
  const int32_t taken = std::min(wanted, pool_.num_free());
  TakeFresh(taken, &table->blocks);
  return std::min(num_tokens, static_cast<int32_t>(table->blocks.size()) * block_size_);
}

void BlockTables::Shorten(BlockTable* table, int32_t num_tokens) {
  const auto needed = static_cast<size_t>(BlocksFor(num_tokens));
  for (; table->blocks.size() > needed; table->blocks.pop_back()) {
    ReleaseBlock(table->blocks.back());
  }
  table->version = next_version_++;
}

void BlockTables::TakeFresh(int32_t count, std::vector<int32_t>* blocks) {
  const size_t first = blocks->size();
  for (int32_t i = 0; i < count; ++i) blocks->push_back(pool_.Allocate());
  if (transfers_) Store(*blocks, first);
  for (size_t i = first; i < blocks->size(); ++i) cache_.Forget((*blocks)[i]);
}

// Whole blocks from the `first`-th on, which are taken for something else, to host memory.
void BlockTables::Store(const std::vector<int32_t>& blocks, size_t first) {
  std::vector<std::pair<int32_t, BlockText>> taken;
  for (size_t i = first; i < blocks.size(); ++i) {
    if (cache_.IsFull(blocks[i])) taken.emplace_back(blocks[i], cache_.TextOf(blocks[i]));
  }
  if (!taken.empty()) transfers_->Store(std::move(taken));
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
  while (GiveBack(block) && is_target_[block]) {
    const auto copy = std::find_if(copies_.begin(), copies_.end(),
                                   [block](const auto& due) { return due.first == block; });
    is_target_[block] = 0;
    block = copy->second;
    --pins_[block];
    copies_.erase(copy);
  }
}

// Whether it is free now.
bool BlockTables::GiveBack(int32_t block) {
  if (transfers_ && pool_.References(block) == 1 && transfers_->Cancel(block)) {
    cache_.Forget(block);  // nothing was loaded to it
  }
  return pool_.Release(block, !cache_.Has(block));
}

void BlockTables::ForgetAll() {
  cache_.Clear();
  if (transfers_) transfers_->Clear();
}

void BlockTables::FinishCopies(const Copies& made) {
  for (const auto& copy : made) {
    const auto due = std::find(copies_.begin(), copies_.end(), copy);
    Require(due != copies_.end(), "copies: one that was made was not due");
    copies_.erase(due);
    is_target_[copy.first] = 0;
    --pins_[copy.second];
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
  if (transfers_) transfers_->Check();
}

}  // namespace triptych
