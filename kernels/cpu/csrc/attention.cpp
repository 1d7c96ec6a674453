#include "attention.h"

namespace triptych {

int value_pitch(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

size_t partial_floats(int head_dim) {
  return static_cast<size_t>(kLanes + value_pitch(head_dim));  // a whole vector before the sums
}

size_t attention_scratch(int head_dim, int heads) {
  const size_t rows = static_cast<size_t>(kTileTokens * heads);
  const size_t pitch = static_cast<size_t>(value_pitch(head_dim));
  // per row: scores, masses, sums and peak of a partition, and the total; then a widened chunk
  return rows * (kChunk + kLanes + pitch + kLanes + partial_floats(head_dim)) +
         kChunk * (static_cast<size_t>(head_dim) + pitch);
}

size_t kv_bytes(KvType type) {
  switch (type) {
    case KvType::kFloat32:
      return 4;
    case KvType::kBfloat16:
      return 2;
    case KvType::kInt8:
      break;
  }
  return 1;
}

}  // namespace triptych
