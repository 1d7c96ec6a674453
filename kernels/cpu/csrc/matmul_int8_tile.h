// The tiles of the matmul kernels for activations in bytes: matmul_tile.h, which comes first, with
// four products to a lane instead of two. The rule at the top of matmul.h holds here.
namespace triptych {
namespace {

constexpr int kQuads = kBlockColumns / 4;
constexpr int kMostByteChunkBlocks = 24;  // unpacked at a time: with the activations they fit in L1
constexpr int kByteRowChunk = 256;        // rows' activations stay in L2 while panels go by

// As TileRows, for bytes.
template <int M>
struct ByteRows {
  const ByteBlock* row[M];

  TRIPTYCH_INLINE ByteRows(const QuantizedRows& activations, int first, int block) {
    for (int i = 0; i < M; ++i)
      row[i] = activations.bytes + static_cast<size_t>(first + i) * activations.block_pitch + block;
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

// What is to be subtracted from a code as quads_of gives it.
constexpr int byte_offset(const FormatShape& shape) {
  return shape.offset + (shape.code_bits == 8 ? kByteOffset : 0);
}

// Codes of columns 8 * eight .. + 7 of the block, in two quads, for byte_column's order.
template <WeightFormat F>
TRIPTYCH_INLINE void quads_of(const Blocks<F>& weights, int eight, Bytes to[2]) {
  constexpr FormatShape kShape = shape_of(F);
  if constexpr (kShape.code_bits == 8) {
    quads_of_bytes(weights.codes + eight * 128, to);
    to[0] = with_byte_offset(to[0]);
    to[1] = with_byte_offset(to[1]);
  } else {
    const Words words = load_words(weights.codes + eight * 64);
    to[0] = byte_nibble(words, 0);
    to[1] = byte_nibble(words, 1);
    if constexpr (kShape.code_bits == 5) {
      const Words plane = load_words(weights.codes + 256);
      to[0] = with_fifth_bits(to[0], plane, 4 * eight);
      to[1] = with_fifth_bits(to[1], plane, 4 * eight + 1);
    }
  }
}

// What a row's sums of a block, or of half of it, start with.
template <int kHalves>
TRIPTYCH_INLINE int32_t start_of(const ByteBlock& x, int half, int offset) {
  return offset * x.minus_sums[kHalves == 1 ? 0 : 1 + half];
}

// M rows by one panel, straight from the packed codes.
template <WeightFormat F, int M>
void direct_byte_tile(const Product& product, int row, int panel) {
  constexpr FormatShape kShape = shape_of(F);
  constexpr int kChains = byte_chains_of_row(M);
  constexpr int kHalfQuads = kQuads / kShape.halves;
  ByteRows<M> rows(product.activations, row, 0);
  Floats y[M];
  for (Floats& sum : y) sum = all_floats(0.0f);
  Blocks<F> weights(product.panel(panel), product.weights.head_blocks);
  for (int block = 0; block < product.weights.columns / kBlockColumns; ++block) {
    weights.advance(block);
    weights.prefetch(kPrefetchBytes);
    rows.hide();
#pragma GCC unroll 2
    for (int half = 0; half < kShape.halves; ++half) {
      ByteSums<kShape.code_bits> sums[M][kChains];
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        for (auto& chain : sums[i]) chain.start(0);
        if constexpr (byte_offset(kShape) != 0)
          sums[i][0].start(start_of<kShape.halves>(*rows.row[i], half, byte_offset(kShape)));
      }
#pragma GCC unroll 8
      for (int q = 0; q < kHalfQuads; ++q) {
        const int quad = half * kHalfQuads + q;
        Bytes codes[2];
        quads_of(weights, quad / 2, codes);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i)
          sums[i][q % kChains].add(codes[quad % 2], broadcast_quad(rows.row[i]->codes + 4 * quad),
                                   q / kChains);
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        Sums sum = sums[i][0].total();
        if constexpr (kChains >= 2) sum = add(sum, sums[i][1].total());
        if constexpr (kChains == 4) sum = add(sum, add(sums[i][2].total(), sums[i][3].total()));
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

// As Unpacked, in bytes; their offset is not subtracted.
struct alignas(64) UnpackedBytes {
  uint8_t codes[kMostByteChunkBlocks][kQuads][kWidePanels][4 * kPanelRows];
  float scales[kMostByteChunkBlocks][2][kWidePanels][kPanelRows];
  float mins[kMostByteChunkBlocks][kWidePanels][kPanelRows];
  float y[kByteRowChunk][kWidePanels][kPanelRows];
};

template <WeightFormat F>
TRIPTYCH_INLINE void unpack_bytes(Blocks<F>& weights, const Chunk& chunk, int panel,
                                  UnpackedBytes& to) {
  constexpr FormatShape kShape = shape_of(F);
  for (int block = 0; block < chunk.blocks; ++block) {
    weights.advance(chunk.block + block);
    store_floats(to.scales[block][0][panel], weights.scale[0]);
    if constexpr (kShape.halves == 2) store_floats(to.scales[block][1][panel], weights.scale[1]);
    if constexpr (kShape.mins) store_floats(to.mins[block][panel], weights.min);
#pragma GCC unroll 4
    for (int eight = 0; eight < kQuads / 2; ++eight) {
      Bytes codes[2];
      quads_of(weights, eight, codes);
      store_words(to.codes[block][2 * eight][panel], codes[0]);
      store_words(to.codes[block][2 * eight + 1][panel], codes[1]);
    }
  }
}

// What a tile needs to know of its weights' format.
template <WeightFormat F>
struct TileShape {
  static constexpr FormatShape kShape = shape_of(F);
  static constexpr bool kMins = kShape.mins;
  static constexpr int kBits = kShape.code_bits, kHalves = kShape.halves,
                       kOffset = byte_offset(kShape);
};

// M rows by the unpacked panels; see wide_tile.
template <class Shape, int M>
void wide_byte_tile(const Product& product, UnpackedBytes& unpacked, const Chunk& chunk, int row,
                    int work) {
  constexpr int kHalfQuads = kQuads / Shape::kHalves;
  ByteRows<M> rows(product.activations, row, chunk.block);
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
    for (int half = 0; half < Shape::kHalves; ++half) {
      ByteSums<Shape::kBits> sums[M][kWidePanels];
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const int32_t start =
            Shape::kOffset ? start_of<Shape::kHalves>(*rows.row[i], half, Shape::kOffset) : 0;
        for (auto& sum : sums[i]) sum.start(start);
      }
#pragma GCC unroll 8
      for (int q = 0; q < kHalfQuads; ++q) {
        const int quad = half * kHalfQuads + q;
        Bytes codes[kWidePanels];
        for (int n = 0; n < kWidePanels; ++n) codes[n] = load_words(unpacked.codes[block][quad][n]);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          const Quad x = broadcast_quad(rows.row[i]->codes + 4 * quad);
          for (int n = 0; n < kWidePanels; ++n) sums[i][n].add(codes[n], x, q);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        for (int n = 0; n < kWidePanels; ++n) {
          const Floats scale = multiply(load_floats(unpacked.scales[block][half][n]),
                                        all_floats(rows.row[i]->scale));
          y[i][n] = multiply_add(floats_of(sums[i][n].total()), scale, y[i][n]);
          if constexpr (Shape::kMins)
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

}  // namespace
}  // namespace triptych
