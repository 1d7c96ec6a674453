// A token's key and value on their way into the cache. Included after a lanes_*.h.
#pragma once
#include "attention_tiles.h"

namespace triptych {
namespace {

// Largest magnitude / 127; NaN when there is a NaN or an infinity.
float int8_scale(const float* x, int size) {
  uint32_t largest = 0;
  for (int i = 0; i < size; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFFu;
    if (bits > largest) largest = bits;
  }
  if (largest >= 0x7F800000u) return __builtin_nanf("");
  float peak;
  __builtin_memcpy(&peak, &largest, sizeof peak);
  return peak / 127.0f;
}

int8_t int8_of(float x, float scale) {
  if (!(scale > 1e-30f)) return 0;
  return static_cast<int8_t>(x / scale + 12582912.0f - 12582912.0f);
}

inline void convert(const float* from, int size, float, float* to) {
  for (int i = 0; i < size; ++i) to[i] = from[i];
}

inline void convert(const float* from, int size, float, uint16_t* to) {
  for (int i = 0; i < size; i += kLanes)
    store(to + i, load_part(from + i, smaller(size - i, kLanes)));
}

inline void convert(const float* from, int size, float scale, int8_t* to) {
  for (int i = 0; i < size; ++i) to[i] = int8_of(from[i], scale);
}

template <typename T>
void store_typed(const KvLayer& layer, uint8_t* head, int offset, const float* key,
                 const float* value) {
  constexpr bool kScaled = sizeof(T) == 1;
  const int size = layer.head_dim;
  const size_t pitch = static_cast<size_t>((size + kLanes - 1) / kLanes * kLanes);
  float* scales = reinterpret_cast<float*>(head + layer.scales_offset) + offset;
  float key_scale = 0.0f, value_scale = 0.0f;
  if (kScaled) {
    scales[0] = key_scale = int8_scale(key, size);
    scales[layer.block_size] = value_scale = int8_scale(value, size);
  }
  convert(value, size, value_scale,
          reinterpret_cast<T*>(head + layer.values_offset) + static_cast<size_t>(offset) * pitch);
  T* keys = reinterpret_cast<T*>(head) + offset;
  for (int d = 0; d < size; d += kChunk) {
    T column[kChunk];
    const int count = smaller(size - d, kChunk);
    convert(key + d, count, key_scale, column);
    for (int i = 0; i < count; ++i)
      keys[static_cast<size_t>(d + i) * static_cast<size_t>(layer.block_size)] = column[i];
  }
}

void store_token(const KvLayer& layer, int block, int offset, int kv_head, const float* key,
                 const float* value) {
  uint8_t* head = layer.data + static_cast<size_t>(block) * layer.block_stride +
                  static_cast<size_t>(kv_head) * layer.head_stride;
  switch (layer.type) {
    case KvType::kFloat32:
      return store_typed<float>(layer, head, offset, key, value);
    case KvType::kBfloat16:
      return store_typed<uint16_t>(layer, head, offset, key, value);
    case KvType::kInt8:
      return store_typed<int8_t>(layer, head, offset, key, value);
  }
}

}  // namespace
}  // namespace triptych
