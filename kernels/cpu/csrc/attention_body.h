// The attention kernels over the sixteen lanes of a lanes_*.h, which is included before.
#include "attention_chunk.h"
#include "attention_store.h"

namespace triptych {
namespace {

template <typename T>
Chunk<T> find_chunk(const KvLayer& layer, const AttentionWork& work, int start, int low, int high) {
  Chunk<T> chunk;
  chunk.scaled = sizeof(T) == 1;
  chunk.start = start;
  chunk.begin = larger(low - start, 0) / kLanes;
  chunk.end = (smaller(high - start, kChunk) + kLanes - 1) / kLanes;
  chunk.key_stride = static_cast<size_t>(layer.block_size);
  chunk.value_stride = static_cast<size_t>((layer.head_dim + kLanes - 1) / kLanes * kLanes);
  for (int v = 0; v < kChunkVectors; ++v) chunk.key_scales[v] = chunk.value_scales[v] = nullptr;
  for (int v = chunk.begin; v < chunk.end; ++v) {
    const int position = start + v * kLanes, offset = position % layer.block_size;
    const uint8_t* head =
        layer.data +
        static_cast<size_t>(work.blocks[position / layer.block_size]) * layer.block_stride +
        static_cast<size_t>(work.kv_head) * layer.head_stride;
    chunk.keys[v] = reinterpret_cast<const T*>(head) + offset;
    chunk.values[v] = reinterpret_cast<const T*>(head + layer.values_offset) +
                      static_cast<size_t>(offset) * chunk.value_stride;
    chunk.next_keys[v] = chunk.keys[v];
    chunk.next_values[v] = chunk.values[v];
    if (chunk.scaled) {
      chunk.key_scales[v] = reinterpret_cast<const float*>(head + layer.scales_offset) + offset;
      chunk.value_scales[v] = chunk.key_scales[v] + layer.block_size;
    }
  }
  return chunk;
}

// Many rows share a chunk: it is widened once. The same numbers, so the same results.
template <typename T>
Chunk<float> widen_chunk(const Chunk<T>& chunk, int head_dim, State& state) {
  Chunk<float> wide;
  wide.scaled = chunk.scaled;
  wide.start = chunk.start;
  wide.begin = chunk.begin;
  wide.end = chunk.end;
  wide.key_stride = kChunk;
  wide.value_stride = chunk.value_stride;
  for (int v = chunk.begin; v < chunk.end; ++v) {
    wide.key_scales[v] = chunk.key_scales[v];
    wide.value_scales[v] = chunk.value_scales[v];
    wide.keys[v] = wide.next_keys[v] = state.keys + v * kLanes;
    wide.values[v] = wide.next_values[v] =
        state.values + static_cast<size_t>(v * kLanes) * chunk.value_stride;
    for (int d = 0; d < head_dim; ++d)
      store(state.keys + d * kChunk + v * kLanes,
            load(chunk.keys[v] + static_cast<size_t>(d) * chunk.key_stride));
    float* to = state.values + static_cast<size_t>(v * kLanes) * chunk.value_stride;
    for (size_t i = 0; i < kLanes * chunk.value_stride; i += kLanes)
      store(to + i, load(chunk.values[v] + i));
  }
  return wide;
}

State place_state(float* scratch, int rows, int head_dim) {
  State state;
  const size_t count = static_cast<size_t>(rows);
  state.pitch = static_cast<size_t>((head_dim + kLanes - 1) / kLanes * kLanes);
  state.total_floats = kLanes + state.pitch;
  const auto place = [&scratch](size_t floats) {
    float* at = scratch;
    scratch += floats;
    return at;
  };
  state.scores = place(count * kChunk);
  state.masses = place(count * kLanes);
  state.sums = place(count * state.pitch);
  state.peaks = place(count * kLanes);
  state.totals = place(count * state.total_floats);
  state.keys = place(static_cast<size_t>(head_dim) * kChunk);
  state.values = place(kChunk * state.pitch);
  return state;
}

void start_partition(int rows, State& state) {
  for (int row = 0; row < rows; ++row) {
    state.peaks[row * kLanes] = -__builtin_inff();
    store(state.masses + row * kLanes, set1(0.0f));
    float* sums = state.sums + static_cast<size_t>(row) * state.pitch;
    for (size_t i = 0; i < state.pitch; i += kLanes) store(sums + i, set1(0.0f));
  }
}

// A partial is peak, mass (at index 1), sums from index kLanes.
void write_partial(int row, const State& state, float* to) {
  to[0] = state.peaks[row * kLanes];
  to[1] = sum(load(state.masses + row * kLanes));
  const float* sums = state.sums + static_cast<size_t>(row) * state.pitch;
  for (size_t i = 0; i < state.pitch; i += kLanes) store(to + kLanes + i, load(sums + i));
}

void add_partial(const float* partial, size_t pitch, float* total) {
  const Lanes peaks = max(set1(total[0]), set1(partial[0]));
  const Lanes ours = exponential(sub(set1(total[0]), peaks));
  const Lanes theirs = exponential(sub(set1(partial[0]), peaks));
  total[0] = first(peaks);
  total[1] = first(fma(set1(partial[1]), theirs, mul(set1(total[1]), ours)));
  for (size_t i = kLanes; i < kLanes + pitch; i += kLanes)
    store(total + i, fma(load(partial + i), theirs, mul(load(total + i), ours)));
}

void write_output(const float* total, int head_dim, float* out) {
  const Lanes mass = set1(total[1]);
  for (int d = 0; d < head_dim; d += kLanes)
    store_part(out + d, div(load(total + kLanes + d), mass), smaller(head_dim - d, kLanes));
}

void merge(const float* partials, int count, size_t stride, int head_dim, float* total,
           float* out) {
  const size_t pitch = static_cast<size_t>((head_dim + kLanes - 1) / kLanes * kLanes);
  for (size_t i = 0; i < kLanes + pitch; i += kLanes) store(total + i, load(partials + i));
  for (int i = 1; i < count; ++i)
    add_partial(partials + static_cast<size_t>(i) * stride, pitch, total);
  write_output(total, head_dim, out);
}

// Positions of a partition that some row of the work sees.
inline Sight reach(const AttentionWork& work, int partition) {
  const Sight first = sight(work, 0), last = sight(work, work.tokens * work.heads - 1);
  return {larger(first.low, partition * kPartition),
          smaller(last.high, (partition + 1) * kPartition)};
}

inline int first_partition(const AttentionWork& work) {
  return work.partition >= 0 ? work.partition : sight(work, 0).low / kPartition;
}

// Lets the work on `chunk` fetch another one, the first of `next` where the partition ends.
template <typename T>
void look_ahead(const KvLayer& layer, const AttentionWork& work, const Sight& seen,
                const AttentionWork* next, Chunk<T>& chunk) {
  Chunk<T> other;
  if (chunk.start + kChunk < seen.high) {
    other = find_chunk<T>(layer, work, chunk.start + kChunk, seen.low, seen.high);
  } else if (next) {
    const Sight sees = reach(*next, first_partition(*next));
    other = find_chunk<T>(layer, *next, sees.low / kChunk * kChunk, sees.low, sees.high);
  } else {
    return;
  }
  for (int v = larger(chunk.begin, other.begin); v < smaller(chunk.end, other.end); ++v) {
    chunk.next_keys[v] = other.keys[v];
    chunk.next_values[v] = other.values[v];
  }
}

template <typename T>
void attend_partition(const KvLayer& layer, const AttentionWork& work, int partition,
                      const AttentionWork* next, State& state) {
  const int rows = work.tokens * work.heads;
  const Sight seen = reach(work, partition);
  start_partition(rows, state);
  for (int start = seen.low / kChunk * kChunk; start < seen.high; start += kChunk) {
    Chunk<T> chunk = find_chunk<T>(layer, work, start, seen.low, seen.high);
    if (sizeof(T) < sizeof(float) && rows >= 2 * kTileRows) {
      attend_chunk(widen_chunk(chunk, layer.head_dim, state), work, layer.head_dim, state);
    } else {
      look_ahead(layer, work, seen, next, chunk);
      attend_chunk(chunk, work, layer.head_dim, state);
    }
  }
}

template <typename T>
void attend_typed(const KvLayer& layer, const AttentionWork& work, const AttentionWork* next,
                  float* scratch) {
  const int rows = work.tokens * work.heads;
  State state = place_state(scratch, rows, layer.head_dim);
  if (work.partition >= 0) {
    attend_partition<T>(layer, work, work.partition, next, state);
    for (int row = 0; row < rows; ++row)
      write_partial(row, state, work.partials + static_cast<size_t>(row) * state.total_floats);
    return;
  }
  const int last = (sight(work, rows - 1).high - 1) / kPartition;
  for (int partition = first_partition(work); partition <= last; ++partition) {
    attend_partition<T>(layer, work, partition, partition == last ? next : nullptr, state);
    for (int row = 0; row < rows; ++row) {
      const Sight seen = sight(work, row);
      const int begin = seen.low / kPartition;
      float* total = state.totals + static_cast<size_t>(row) * state.total_floats;
      if (partition < begin || partition > (seen.high - 1) / kPartition) continue;
      if (partition == begin) {
        write_partial(row, state, total);
      } else {
        float* partial = state.keys;  // of no use any more
        write_partial(row, state, partial);
        add_partial(partial, state.pitch, total);
      }
    }
  }
  for (int row = 0; row < rows; ++row)
    write_output(state.totals + static_cast<size_t>(row) * state.total_floats, layer.head_dim,
                 work.out + static_cast<size_t>(row / work.heads) * work.out_pitch +
                     static_cast<size_t>(row % work.heads * layer.head_dim));
}

void attend(const KvLayer& layer, const AttentionWork& work, const AttentionWork* next,
            float* scratch) {
  switch (layer.type) {
    case KvType::kFloat32:
      return attend_typed<float>(layer, work, next, scratch);
    case KvType::kBfloat16:
      return attend_typed<uint16_t>(layer, work, next, scratch);
    case KvType::kInt8:
      return attend_typed<int8_t>(layer, work, next, scratch);
  }
}

constexpr AttentionKernels kAttention = {store_token, attend, merge};

}  // namespace
}  // namespace triptych
