// A hash map from digests to int32, in one array: half of its places at most are taken, the next
// free one is taken on a collision, and what stood behind an erased entry moves up. Blocks enter
// and leave it in every step, so it allocates only to grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "blake2b.h"

namespace triptych {

class DigestMap {
 public:
  // The value, which may be changed through the pointer until the next Insert or Erase; or nullptr.
  int32_t* Find(const Digest& key) {
    return const_cast<int32_t*>(static_cast<const DigestMap*>(this)->Find(key));
  }
  const int32_t* Find(const Digest& key) const {
    const Entry& entry = entries_[IndexOf(key)];
    return entry.taken ? &entry.value : nullptr;
  }

  // The value, and whether it is the new one: an old one stays.
  std::pair<int32_t*, bool> Insert(const Digest& key, int32_t value) {
    if (2 * (size_ + 1) > entries_.size()) Grow();
    Entry& entry = entries_[IndexOf(key)];
    const bool is_new = !entry.taken;
    if (is_new) {
      entry = {key, value, true};
      ++size_;
    }
    return {&entry.value, is_new};
  }

  void Erase(const Digest& key) {
    size_t hole = IndexOf(key);
    if (!entries_[hole].taken) return;
    --size_;
    for (size_t i = Next(hole); entries_[i].taken; i = Next(i)) {
      // An entry may move to the hole if it lies at or behind the entry's own place, cyclically.
      const size_t home = HomeOf(entries_[i].key);
      if (((i - home) & mask()) >= ((i - hole) & mask())) {
        entries_[hole] = entries_[i];
        hole = i;
      }
    }
    entries_[hole].taken = false;
  }

  void Clear() {
    for (Entry& entry : entries_) entry.taken = false;
    size_ = 0;
  }

  size_t size() const { return size_; }

  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const Entry& entry : entries_) {
      if (entry.taken) visit(entry.key, entry.value);
    }
  }

 private:
  struct Entry {
    Digest key{};
    int32_t value = 0;
    bool taken = false;
  };

  size_t mask() const { return entries_.size() - 1; }
  size_t Next(size_t i) const { return (i + 1) & mask(); }

  size_t HomeOf(const Digest& key) const {
    size_t head;  // a digest is spread evenly already
    std::memcpy(&head, key.data(), sizeof(head));
    return head & mask();
  }

  // Where the key is, or the free place where it would go.
  size_t IndexOf(const Digest& key) const {
    size_t i = HomeOf(key);
    while (entries_[i].taken && entries_[i].key != key) i = Next(i);
    return i;
  }

  void Grow() {
    std::vector<Entry> old(2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.taken) entries_[IndexOf(entry.key)] = entry;
    }
  }

  std::vector<Entry> entries_ = std::vector<Entry>(64);
  size_t size_ = 0;
};

}  // namespace triptych
