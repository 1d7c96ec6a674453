// The tiles of the matmul kernels, in the terms of matmul_lanes_*.h, which the file includes first.
// The rule at the top of matmul.h holds here. Everything works on all 16 rows of a panel at once.
#include "packed_formats.h"

namespace triptych {
namespace {

constexpr int kPairs = kBlockColumns / 2;
constexpr int kPrefetchBytes = 4096;  // how far ahead direct tiles fetch the packed weights
constexpr int kMostChunkBlocks = 12;  // unpacked at a time: with the activations they fit in L1
constexpr int kRowChunk = 192;        // rows' activations stay in L2 while panels go by

// What one call works on.
struct Product {
  const PackedMatrix& weights;
  const QuantizedRows& activations;
  float* out;
  size_t out_pitch;
  bool add;

  TRIPTYCH_INLINE const uint8_t* panel(int index) const {
    return weights.data + static_cast<size_t>(index) * weights.panel_bytes;
  }
  TRIPTYCH_INLINE void store(int row, int panel, Floats y) const {
    const int left = weights.rows - panel * kPanelRows;
    store_lanes(out + static_cast<size_t>(row) * out_pitch + panel * kPanelRows,
                first_lanes(left < kPanelRows ? left : kPanelRows), y, add);
  }
};

// Walks the activations of a tile's rows. The empty assembly hides from the compiler how the
// pointers come about: it would otherwise keep an address for each of the hundred loads of a block.
template <int M>
struct TileRows {
  const QuantizedBlock* row[M];

  TRIPTYCH_INLINE TileRows(const QuantizedRows& activations, int first, int block) {
    for (int i = 0; i < M; ++i)
      row[i] =
          activations.blocks + static_cast<size_t>(first + i) * activations.block_pitch + block;
  }
  TRIPTYCH_INLINE void hide() {
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) asm volatile("" : "+r"(row[i]));
  }
  TRIPTYCH_INLINE void advance() {
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) ++row[i];
  }
};

// Walks the blocks of a panel.
template <WeightFormat F>
struct Blocks {
  static constexpr FormatShape kShape = shape_of(F);
  const uint8_t* next;
  const uint8_t* codes = nullptr;
  int head_blocks;    // of the matrix
  int head_left = 0;  // blocks that the head at hand is still for (groups)
  Floats head_scale, head_min;
  Floats scale[2], min;

  TRIPTYCH_INLINE Blocks(const uint8_t* panel, int head_blocks)
      : next(panel), head_blocks(head_blocks) {
    head_scale = head_min = scale[0] = scale[1] = min = all_floats(0.0f);
  }

  TRIPTYCH_INLINE void advance(int block) {
    if constexpr (kShape.grouped) {
      if (head_left == 0) {
        scale[0] = load_halves(next);
        min = multiply(scale[0], load_halves(next + 2 * kPanelRows));
        next += kShape.head_bytes;
        head_left = head_blocks;
      }
      --head_left;
    } else if constexpr (kShape.super) {
      if (block % kSuperBlocks == 0) {
        head_scale = load_halves(next);
        if constexpr (kShape.mins) head_min = load_halves(next + 2 * kPanelRows);
        next += kShape.head_bytes;
      }
      if constexpr (kShape.mins) {
        scale[0] = multiply(head_scale, load_unsigned_bytes(next));
        min = multiply(head_min, load_unsigned_bytes(next + kPanelRows));
      } else {
        scale[0] = multiply(head_scale, load_signed_bytes(next));
        scale[1] = multiply(head_scale, load_signed_bytes(next + kPanelRows));
      }
    } else {
      scale[0] = load_halves(next);
      if constexpr (kShape.mins) min = load_halves(next + 2 * kPanelRows);
    }
    codes = next + kShape.scale_bytes;
    next += kShape.block_bytes;
  }

  // A block's bytes, so far behind this one's codes, into L2: L1 takes too few misses at a time.
  TRIPTYCH_INLINE void prefetch(int distance) const {
    for (int line = 0; line < kShape.block_bytes; line += 64)
      __builtin_prefetch(codes + distance + line, 0, 2);
  }

  // Codes of columns 2 * pair and 2 * pair + 1 as they are stored: the offset is the caller's.
  TRIPTYCH_INLINE Words pair(int pair) const {
    if constexpr (kShape.code_bits == 8) return words_of_bytes(codes + pair * 32);
    const Words code = nibble(load_words(codes + pair / 4 * 64), pair % 4);
    if constexpr (kShape.code_bits == 5) return with_fifth_bit(code, load_words(codes + 256), pair);
    return code;
  }
};

// M rows by one panel, straight from the packed codes.
template <WeightFormat F, int M>
void direct_tile(const Product& product, int row, int panel) {
  constexpr FormatShape kShape = shape_of(F);
  constexpr int kChains = chains_of_row(M);
  constexpr int kHalfPairs = kPairs / kShape.halves;
  TileRows<M> rows(product.activations, row, 0);
  Floats y[M];
  for (Floats& sum : y) sum = all_floats(0.0f);
  Blocks<F> weights(product.panel(panel), product.weights.head_blocks);
  for (int block = 0; block < product.weights.columns / kBlockColumns; ++block) {
    weights.advance(block);
    weights.prefetch(kPrefetchBytes);
    rows.hide();
#pragma GCC unroll 2
    for (int half = 0; half < kShape.halves; ++half) {
      Sums sums[M][kChains];
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        for (Sums& sum : sums[i]) sum = all_sums(0);
        if constexpr (kShape.offset != 0)
          sums[i][0] = all_sums(-kShape.offset * rows.row[i]->code_sum);
      }
#pragma GCC unroll 16
      for (int p = 0; p < kHalfPairs; ++p) {
        const int pair = half * kHalfPairs + p;
        const Words codes = weights.pair(pair);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i)
          sums[i][p % kChains] =
              dot(sums[i][p % kChains], codes, broadcast_pair(rows.row[i]->codes + 2 * pair));
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        Sums sum = sums[i][0];
        if constexpr (kChains == 2) sum = add(sum, sums[i][1]);
        if constexpr (kChains == 4) sum = add(add(sum, sums[i][1]), add(sums[i][2], sums[i][3]));
        const Floats scale = multiply(weights.scale[half], all_floats(rows.row[i]->scale));
        y[i] = multiply_add(floats_of(sum), scale, y[i]);
        if constexpr (kShape.mins)
          y[i] = multiply_add(weights.min, all_floats(rows.row[i]->sum), y[i]);
      }
    }
    rows.advance();
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) product.store(row + i, panel, y[i]);
}

// Some blocks of kWidePanels panels, unpacked once for many rows, and those rows' sums over the
// blocks before.
struct alignas(64) Unpacked {
  int16_t codes[kMostChunkBlocks][kPairs][kWidePanels][2 * kPanelRows];
  float scales[kMostChunkBlocks][2][kWidePanels][kPanelRows];
  float mins[kMostChunkBlocks][kWidePanels][kPanelRows];
  float y[kRowChunk][kWidePanels][kPanelRows];
};

// Which blocks are unpacked.
struct Chunk {
  int panel, panels;
  int block, blocks;
  bool last;                          // no columns follow
  const uint8_t* ahead[kWidePanels];  // what will be unpacked next
  int ahead_bytes;                    // per panel and block
};

template <WeightFormat F>
TRIPTYCH_INLINE void unpack_blocks(Blocks<F>& weights, const Chunk& chunk, int panel,
                                   Unpacked& to) {
  constexpr FormatShape kShape = shape_of(F);
  for (int block = 0; block < chunk.blocks; ++block) {
    weights.advance(chunk.block + block);
    store_floats(to.scales[block][0][panel], weights.scale[0]);
    if constexpr (kShape.halves == 2) store_floats(to.scales[block][1][panel], weights.scale[1]);
    if constexpr (kShape.mins) store_floats(to.mins[block][panel], weights.min);
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairs; ++pair)
      store_words(to.codes[block][pair][panel], subtract(weights.pair(pair), kShape.offset));
  }
}

// M rows by the unpacked panels. `work` is where the rows' sums are kept in `unpacked.y`. Outputs
// are stored here, not in a loop of their own, so that the stores hide behind other tiles' sums.
template <bool kMins, int kHalves, int M>
void wide_tile(const Product& product, Unpacked& unpacked, const Chunk& chunk, int row, int work) {
  constexpr int kHalfPairs = kPairs / kHalves;
  TileRows<M> rows(product.activations, row, chunk.block);
  Floats y[M][kWidePanels];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < kWidePanels; ++n)
      y[i][n] = chunk.block == 0 ? all_floats(0.0f) : load_floats(unpacked.y[work + i][n]);
  for (int block = 0; block < chunk.blocks; ++block) {
    rows.hide();
    if (work == 0)  // the chunk's first tile fetches the next chunk, a block at a time
      for (const uint8_t* ahead : chunk.ahead)
        for (int line = 0; line < chunk.ahead_bytes; line += 64)
          __builtin_prefetch(ahead + block * chunk.ahead_bytes + line);
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      Sums sums[M][kWidePanels];
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i)
        for (Sums& sum : sums[i]) sum = all_sums(0);
#pragma GCC unroll 16
      for (int p = 0; p < kHalfPairs; ++p) {
        const int pair = half * kHalfPairs + p;
        Words codes[kWidePanels];
        for (int n = 0; n < kWidePanels; ++n) codes[n] = load_words(unpacked.codes[block][pair][n]);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          const Pair x = broadcast_pair(rows.row[i]->codes + 2 * pair);
          for (int n = 0; n < kWidePanels; ++n) sums[i][n] = dot(sums[i][n], codes[n], x);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        for (int n = 0; n < kWidePanels; ++n) {
          const Floats scale = multiply(load_floats(unpacked.scales[block][half][n]),
                                        all_floats(rows.row[i]->scale));
          y[i][n] = multiply_add(floats_of(sums[i][n]), scale, y[i][n]);
          if constexpr (kMins)
            y[i][n] = multiply_add(load_floats(unpacked.mins[block][n]),
                                   all_floats(rows.row[i]->sum), y[i][n]);
        }
      }
    }
    rows.advance();
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < kWidePanels; ++n)
      if (!chunk.last)
        store_floats(unpacked.y[work + i][n], y[i][n]);
      else if (n < chunk.panels)
        product.store(row + i, chunk.panel + n, y[i][n]);
}

template <WeightFormat F>
TRIPTYCH_INLINE Floats load_weights(const uint8_t* panel, int column) {
  const size_t index = static_cast<size_t>(column) * kPanelRows;
  if constexpr (F == WeightFormat::kF32) return load_floats(panel + 4 * index);
  if constexpr (F == WeightFormat::kF16) return load_halves(panel + 2 * index);
  return load_bfloats(panel + 2 * index);
}

// M rows by P panels of float weights.
template <WeightFormat F, int M, int P>
void float_tile(const Product& product, int row, int panel) {
  const uint8_t* weights[P];
  for (int n = 0; n < P; ++n) weights[n] = product.panel(panel + n);
  const float* x[M];
  for (int i = 0; i < M; ++i)
    x[i] =
        product.activations.floats + static_cast<size_t>(row + i) * product.activations.float_pitch;
  Floats y[M][P];
  for (auto& sums : y)
    for (Floats& sum : sums) sum = all_floats(0.0f);
  for (int column = 0; column < product.weights.columns; ++column) {
    Floats w[P];
    for (int n = 0; n < P; ++n) w[n] = load_weights<F>(weights[n], column);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
      for (int n = 0; n < P; ++n) y[i][n] = multiply_add(w[n], all_floats(x[i][column]), y[i][n]);
  }
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < P; ++n) product.store(row + i, panel + n, y[i][n]);
}

}  // namespace
}  // namespace triptych
