#include "prefix_cache.h"

#include <algorithm>
#include <string>

#include "errors.h"

namespace triptych {
namespace {

constexpr int kChildrenLookedAt = 32;

}  // namespace

Digest BlockDigest(const Digest& parent, const int32_t* tokens, size_t count) {
  return Blake2b128(parent.data(), parent.size(), tokens, count * sizeof(int32_t));
}

PrefixCache::PrefixCache(int32_t num_blocks, int32_t block_size)
    : block_size_(block_size),
      entries_(num_blocks),
      tokens_(static_cast<size_t>(num_blocks) * block_size) {}

int32_t PrefixCache::FindFull(const Digest& digest, const Digest& parent,
                              const int32_t* tokens) const {
  const int32_t* found = full_.Find(digest);
  if (found == nullptr) return -1;
  const int32_t block = *found;
  if (entries_[block].parent != parent) return -1;
  return std::equal(tokens, tokens + block_size_, Tokens(block)) ? block : -1;
}

PartialHit PrefixCache::FindPartial(const Digest& parent, const int32_t* tokens,
                                    int64_t count) const {
  PartialHit best{-1, 0};
  const int32_t* first = first_child_.Find(parent);
  int32_t block = first == nullptr ? -1 : *first;
  for (int seen = 0; block >= 0 && seen < kChildrenLookedAt; ++seen) {
    const int32_t common = CommonTokens(block, tokens, count);
    if (common > best.num_tokens ||
        (common == best.num_tokens && common > 0 && block < best.block)) {
      best = {block, common};
    }
    block = entries_[block].next;
  }
  return best;
}

int32_t PrefixCache::CommonTokens(int32_t block, const int32_t* tokens, int64_t count) const {
  const auto most = static_cast<int32_t>(std::min<int64_t>(count, entries_[block].count));
  return static_cast<int32_t>(std::mismatch(tokens, tokens + most, Tokens(block)).first - tokens);
}

bool PrefixCache::AddFull(int32_t block, const Digest& digest, const Digest& parent,
                          const int32_t* tokens) {
  if (!full_.Insert(digest, block).second) return false;
  Link(block, parent, tokens, block_size_);
  entries_[block].digest = digest;
  return true;
}

bool PrefixCache::AddPartial(int32_t block, const Digest& parent, const int32_t* tokens,
                             int32_t count) {
  if (FindPartial(parent, tokens, count).num_tokens == count) return false;
  Link(block, parent, tokens, count);
  return true;
}

void PrefixCache::Link(int32_t block, const Digest& parent, const int32_t* tokens, int32_t count) {
  Entry& entry = entries_[block];
  entry.parent = parent;
  entry.count = count;
  std::copy(tokens, tokens + count, tokens_.data() + static_cast<size_t>(block) * block_size_);
  const auto [head, alone] = first_child_.Insert(parent, block);
  entry.previous = -1;
  entry.next = alone ? -1 : *head;
  if (!alone) entries_[entry.next].previous = *head = block;
  ++size_;
}

void PrefixCache::Forget(int32_t block) {
  Entry& entry = entries_[block];
  if (entry.count == 0) return;
  if (entry.count == block_size_) full_.Erase(entry.digest);
  if (entry.next >= 0) entries_[entry.next].previous = entry.previous;
  if (entry.previous >= 0) {
    entries_[entry.previous].next = entry.next;
  } else if (entry.next >= 0) {
    *first_child_.Find(entry.parent) = entry.next;
  } else {
    first_child_.Erase(entry.parent);
  }
  entry.count = 0;
  --size_;
}

void PrefixCache::Clear() {
  for (Entry& entry : entries_) entry.count = 0;
  full_.Clear();
  first_child_.Clear();
  size_ = 0;
}

void PrefixCache::Check() const {
  int32_t found = 0;
  size_t full = 0;
  first_child_.ForEach([&](const Digest& parent, int32_t first) {
    int32_t before = -1;
    for (int32_t block = first; block >= 0; block = entries_[block].next) {
      const Entry& entry = entries_[block];
      if (entry.count < 1 || entry.count > block_size_ || entry.parent != parent ||
          entry.previous != before || ++found > size_) {
        throw BrokenInvariant("cache: block " + std::to_string(block) + " is a child of nobody");
      }
      if (entry.count == block_size_) {
        const int32_t* indexed = full_.Find(entry.digest);
        if (indexed == nullptr || *indexed != block) {
          throw BrokenInvariant("cache: full block " + std::to_string(block) + " is not indexed");
        }
        ++full;
      }
      before = block;
    }
  });
  if (found != size_ || full != full_.size()) {
    throw BrokenInvariant("cache: the children are not the blocks that can be found");
  }
}

}  // namespace triptych
