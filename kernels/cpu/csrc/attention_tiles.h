// The inner loops of attention: tiles of query rows by sixteens of keys or of value dimensions.
// Included after a lanes_*.h.
#pragma once
#include "attention.h"

namespace triptych {
namespace {

constexpr int kChunkVectors = kChunk / kLanes;

// Where a chunk's keys and values stand: sixteen tokens each. Elements are of type T.
template <typename T>
struct Chunk {
  const T* keys[kChunkVectors];  // [head_dim][key_stride]
  size_t key_stride;
  const T* values[kChunkVectors];  // [16][value_pitch]
  size_t value_stride;
  // The same of the chunk that is read next (of this one when there is none): each step of a tile
  // asks memory for the place that corresponds to its own, so that the loads spread over the work.
  const T* next_keys[kChunkVectors];
  const T* next_values[kChunkVectors];
  const float* key_scales[kChunkVectors];
  const float* value_scales[kChunkVectors];
  bool scaled;     // whether there are scales: int8
  int start;       // position of the first token
  int begin, end;  // vectors that some query sees
};

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

template <int N>
struct Count {
  static constexpr int value = N;
};

template <typename T, int Rows, int Vectors>
inline void score_tile(const Chunk<T>& chunk, const float* const* q, int head_dim, int vector,
                       float* scores) {
  Lanes acc[Rows][Vectors];
  for (auto& row : acc)
    for (Lanes& lanes : row) lanes = set1(0.0f);
  for (int d = 0; d < head_dim; ++d) {
    Lanes k[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      const size_t at = static_cast<size_t>(d) * chunk.key_stride;
      k[v] = load(chunk.keys[vector + v] + at);
      __builtin_prefetch(chunk.next_keys[vector + v] + at);
    }
    for (int r = 0; r < Rows; ++r) {
      const Lanes a = set1(q[r][d]);
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(a, k[v], acc[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(scores + r * kChunk + (vector + v) * kLanes, acc[r][v]);
}

// sums[r][offset..] += weights[r][t] * values[t][offset..] for tokens [begin, end) of the chunk.
template <typename T, int Rows, int Vectors>
inline void value_tile(const Chunk<T>& chunk, const float* weights, int begin, int end,
                       size_t offset, float* sums, size_t pitch) {
  Lanes acc[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      acc[r][v] = load(sums + static_cast<size_t>(r) * pitch + offset + v * kLanes);
  for (int t = begin; t < end;) {
    const size_t at = static_cast<size_t>(t % kLanes) * chunk.value_stride + offset;
    const T* values = chunk.values[t / kLanes] + at;
    const T* next = chunk.next_values[t / kLanes] + at;
    const int stop = smaller(end, t / kLanes * kLanes + kLanes);
    for (; t < stop; ++t, values += chunk.value_stride, next += chunk.value_stride) {
      Lanes v[Vectors];
      for (int i = 0; i < Vectors; ++i) {
        v[i] = load(values + i * kLanes);
        __builtin_prefetch(next + i * kLanes);
      }
      for (int r = 0; r < Rows; ++r) {
        const Lanes weight = set1(weights[r * kChunk + t]);
        for (int i = 0; i < Vectors; ++i) acc[r][i] = fma(weight, v[i], acc[r][i]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      store(sums + static_cast<size_t>(r) * pitch + offset + v * kLanes, acc[r][v]);
}

// The widest of 4, 2 and 1 vectors that is left, as a template argument.
template <typename F>
inline void for_vectors(int begin, int end, F f) {
  while (begin < end) {
    if (kTileVectors >= 4 && end - begin >= 4) {
      f(begin, Count<kTileVectors >= 4 ? 4 : 1>());
      begin += 4;
    } else if (kTileVectors >= 2 && end - begin >= 2) {
      f(begin, Count<kTileVectors >= 2 ? 2 : 1>());
      begin += 2;
    } else {
      f(begin, Count<1>());
      begin += 1;
    }
  }
}

// Likewise tiles of rows.
template <typename F>
inline void for_rows(int rows, F f) {
  for (int row = 0; row < rows;) {
    const int left = rows - row;
    if (kTileRows >= 6 && left >= 6) {
      f(row, Count<kTileRows >= 6 ? 6 : 1>());
      row += 6;
    } else if (kTileRows >= 4 && left >= 4) {
      f(row, Count<kTileRows >= 4 ? 4 : 1>());
      row += 4;
    } else if (kTileRows >= 3 && left >= 3) {
      f(row, Count<kTileRows >= 3 ? 3 : 1>());
      row += 3;
    } else if (kTileRows >= 2 && left >= 2) {
      f(row, Count<kTileRows >= 2 ? 2 : 1>());
      row += 2;
    } else {
      f(row, Count<1>());
      row += 1;
    }
  }
}

}  // namespace
}  // namespace triptych
