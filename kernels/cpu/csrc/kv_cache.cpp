#include "kv_cache.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace triptych {
namespace {

constexpr size_t kAlignment = 64;

size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Of one head of one block.
struct HeadBytes {
  size_t values_offset, scales_offset, total;
};

HeadBytes head_bytes(const KvShape& shape) {
  const size_t tokens = static_cast<size_t>(shape.block_size);
  const size_t keys = tokens * static_cast<size_t>(shape.head_dim) * kv_bytes(shape.type);
  const size_t values =
      tokens * static_cast<size_t>(value_pitch(shape.head_dim)) * kv_bytes(shape.type);
  const size_t scales = shape.type == KvType::kInt8 ? 2 * tokens * sizeof(float) : 0;
  HeadBytes bytes;
  bytes.values_offset = round_up(keys);
  bytes.scales_offset = bytes.values_offset + round_up(values);
  bytes.total = bytes.scales_offset + round_up(scales);
  return bytes;
}

const KvShape& checked(const KvShape& shape) {
  if (shape.block_size < 1 || shape.block_size % kLanes != 0)
    throw std::invalid_argument("block_size " + std::to_string(shape.block_size) +
                                " is not a multiple of " + std::to_string(kLanes));
  if (shape.layers < 1 || shape.num_blocks < 1 || shape.kv_heads < 1 || shape.head_dim < 1)
    throw std::invalid_argument("a KV cache needs layers, blocks, heads and dimensions");
  return shape;
}

}  // namespace

size_t KvCache::block_bytes(const KvShape& shape) {
  const size_t heads =
      static_cast<size_t>(checked(shape).layers) * static_cast<size_t>(shape.kv_heads);
  return heads * head_bytes(shape).total;
}

KvCache::KvCache(const KvShape& shape)
    : shape_(checked(shape)), pages_(block_bytes(shape) * static_cast<size_t>(shape.num_blocks)) {}

// A block's layers lie together, so that a cache in little use touches few pages.
KvLayer KvCache::layer(int index) const {
  const HeadBytes bytes = head_bytes(shape_);
  KvLayer layer{};
  layer.head_stride = bytes.total;
  layer.block_stride = block_bytes(shape_);
  layer.values_offset = bytes.values_offset;
  layer.scales_offset = bytes.scales_offset;
  layer.data = pages_.data() +
               static_cast<size_t>(index) * static_cast<size_t>(shape_.kv_heads) * bytes.total;
  layer.type = shape_.type;
  layer.head_dim = shape_.head_dim;
  layer.block_size = shape_.block_size;
  return layer;
}

void KvCache::copy(int source, int target) {
  const size_t size = block_bytes(shape_);
  std::memcpy(pages_.data() + static_cast<size_t>(target) * size,
              pages_.data() + static_cast<size_t>(source) * size, size);
}

}  // namespace triptych
