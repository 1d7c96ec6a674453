// The keys and values of a model: all layers, in blocks of tokens, in one run of pages.
#pragma once
#include "attention.h"
#include "memory.h"

namespace triptych {

struct KvShape {
  int layers, num_blocks, block_size, kv_heads, head_dim;
  KvType type;
};

class KvCache {
 public:
  // Throws std::invalid_argument unless block_size is a multiple of kLanes; std::bad_alloc.
  explicit KvCache(const KvShape& shape);

  KvLayer layer(int index) const;
  // All layers of block `source` to block `target`.
  void copy(int source, int target);

  size_t num_bytes() const { return pages_.size(); }

  // Bytes of one block in all layers.
  static size_t block_bytes(const KvShape& shape);

 private:
  KvShape shape_;
  Pages pages_;
};

}  // namespace triptych
