// What a chunk of 64 positions does to the state of its queries: scores, softmax, sums of values.
// Included after a lanes_*.h.
#pragma once
#include "attention_tiles.h"
#include "lanes_exp.h"

namespace triptych {
namespace {

// The state of a query head over the chunks of a partition; places in scratch.
struct State {
  float* scores;  // [rows][kChunk]: scores, then weights
  float* masses;  // [rows][kLanes]
  float* sums;    // [rows][pitch]
  float* peaks;   // [rows][kLanes], one used
  float* totals;  // [rows][partial_floats]
  float* keys;    // [head_dim][kChunk]: a chunk widened to float32
  float* values;  // [kChunk][pitch]
  size_t pitch, total_floats;
};

// What a row sees: positions [low, high).
struct Sight {
  int low, high;
};

inline Sight sight(const AttentionWork& work, int row) {
  const int position = work.first_position + row / work.heads;
  return {position < work.window ? 0 : position - work.window + 1, position + 1};
}

inline const float* query(const AttentionWork& work, int row, int head_dim) {
  return work.q + static_cast<size_t>(row / work.heads) * work.q_pitch +
         static_cast<size_t>(row % work.heads) * static_cast<size_t>(head_dim);
}

template <typename T>
void score_chunk(const Chunk<T>& chunk, const AttentionWork& work, int head_dim, State& state) {
  for_rows(work.tokens * work.heads, [&](int row, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const float* q[kRows];
    for (int r = 0; r < kRows; ++r) q[r] = query(work, row + r, head_dim);
    for_vectors(chunk.begin, chunk.end, [&](int vector, auto vectors) {
      score_tile<T, kRows, decltype(vectors)::value>(chunk, q, head_dim, vector,
                                                     state.scores + row * kChunk);
    });
  });
}

// Scores of one row -> weights, and what has been summed so far -> in units of the new peak.
// `Whole`: the row sees all of the chunk, which has no scales; the same numbers in fewer steps.
// `Capped`: scores are bounded by `cap`.
template <bool Whole, bool Capped, typename T>
inline void weigh(const Chunk<T>& chunk, int low, int high, int row, float cap, State& state) {
  float* scores = state.scores + row * kChunk;
  const int begin = Whole ? 0 : low / kLanes;
  const int end = Whole ? kChunkVectors : (high + kLanes - 1) / kLanes;
  const auto seen = [&](const Lanes& lanes, int v, float otherwise) {
    if (Whole) return lanes;
    return within(lanes, larger(low - v * kLanes, 0), smaller(high - v * kLanes, kLanes),
                  otherwise);
  };
  Lanes best = set1(-__builtin_inff()), score[kChunkVectors];
  for (int v = begin; v < end; ++v) {
    score[v] = load(scores + v * kLanes);
    if (!Whole && chunk.scaled) score[v] = mul(score[v], load(chunk.key_scales[v]));
    if (Capped) score[v] = soft_cap(score[v], set1(cap), set1(1.0f / cap));
    score[v] = seen(score[v], v, -__builtin_inff());
    best = max(best, score[v]);
  }
  const float before = state.peaks[row * kLanes], now = peak(max(set1(before), best));
  Lanes mass = set1(0.0f);
  for (int v = begin; v < end; ++v) {
    Lanes weight = seen(exponential(sub(score[v], set1(now))), v, 0.0f);
    mass = add(mass, weight);
    if (!Whole && chunk.scaled) weight = mul(weight, load(chunk.value_scales[v]));
    store(scores + v * kLanes, weight);
  }
  float* masses = state.masses + row * kLanes;
  if (before == now) {  // the factor would be exactly 1
    store(masses, add(load(masses), mass));
    return;
  }
  const Lanes factor = set1(first(exponential(set1(before - now))));
  store(masses, fma(load(masses), factor, mass));
  float* sums = state.sums + static_cast<size_t>(row) * state.pitch;
  for (size_t i = 0; i < state.pitch; i += kLanes) store(sums + i, mul(load(sums + i), factor));
  state.peaks[row * kLanes] = now;
}

template <typename T>
void weigh_row(const Chunk<T>& chunk, const Sight& seen, int row, float cap, State& state) {
  const int low = larger(seen.low - chunk.start, 0),
            high = smaller(seen.high - chunk.start, kChunk);
  if (high <= low) return;
  if (cap > 0.0f)
    weigh<false, true>(chunk, low, high, row, cap, state);
  else if (low == 0 && high == kChunk && !chunk.scaled)
    weigh<true, false>(chunk, low, high, row, cap, state);
  else
    weigh<false, false>(chunk, low, high, row, cap, state);
}

template <typename T, int Rows>
void add_values(const Chunk<T>& chunk, int row, int begin, int end, State& state) {
  if (begin >= end) return;
  for_vectors(0, static_cast<int>(state.pitch) / kLanes, [&](int vector, auto vectors) {
    value_tile<T, Rows, decltype(vectors)::value>(
        chunk, state.scores + row * kChunk, begin, end, static_cast<size_t>(vector * kLanes),
        state.sums + static_cast<size_t>(row) * state.pitch, state.pitch);
  });
}

// Tokens that all rows of a tile see are added together, the others row by row: a token out of a
// row's sight may hold anything, NaN too.
template <typename T>
void add_chunk(const Chunk<T>& chunk, const AttentionWork& work, State& state) {
  for_rows(work.tokens * work.heads, [&](int row, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const int last = row + kRows - 1;
    const int low = larger(sight(work, last).low - chunk.start, 0);
    const int high = smaller(sight(work, row).high - chunk.start, kChunk);
    const bool shared = low < high;
    for (int r = row; shared && r <= last; ++r)
      add_values<T, 1>(chunk, r, larger(sight(work, r).low - chunk.start, 0), low, state);
    add_values<T, kRows>(chunk, row, low, high, state);
    for (int r = row; r <= last; ++r) {
      const Sight seen = sight(work, r);
      const int begin = shared ? high : larger(seen.low - chunk.start, 0);
      add_values<T, 1>(chunk, r, begin, smaller(seen.high - chunk.start, kChunk), state);
    }
  });
}

template <typename T>
void attend_chunk(const Chunk<T>& chunk, const AttentionWork& work, int head_dim, State& state) {
  score_chunk(chunk, work, head_dim, state);
  for (int row = 0; row < work.tokens * work.heads; ++row)
    weigh_row(chunk, sight(work, row), row, work.soft_cap, state);
  add_chunk(chunk, work, state);
}

}  // namespace
}  // namespace triptych
