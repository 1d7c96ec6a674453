// The matmul kernels over the tiles of matmul_tile.h; included last by each instruction set's file.
// The rule at the top of matmul.h holds here.
namespace triptych {
namespace {

template <WeightFormat F, int M>
void direct_rows(const Product& product, int row, int panel, int panel_end) {
  for (; panel < panel_end; ++panel) direct_tile<F, M>(product, row, panel);
}

// Rows [row, row + count) over the unpacked blocks, in tiles of about the same size.
template <bool kMins, int kHalves>
void wide_rows(const Product& product, Unpacked& unpacked, const Chunk& chunk, int row, int count) {
  int tiles = (count + kWideRows - 1) / kWideRows;
  for (int done = 0; tiles > 0; --tiles) {
    const int size = (count - done + tiles - 1) / tiles;
    switch (size) {
      case 1:
        wide_tile<kMins, kHalves, 1>(product, unpacked, chunk, row + done, done);
        break;
      case 2:
        wide_tile<kMins, kHalves, 2>(product, unpacked, chunk, row + done, done);
        break;
      case 3:
        wide_tile<kMins, kHalves, 3>(product, unpacked, chunk, row + done, done);
        break;
      case 4:
        wide_tile<kMins, kHalves, 4>(product, unpacked, chunk, row + done, done);
        break;
      case 5:
        if constexpr (kWideRows >= 5)
          wide_tile<kMins, kHalves, 5>(product, unpacked, chunk, row + done, done);
        break;
      case 6:
        if constexpr (kWideRows >= 6)
          wide_tile<kMins, kHalves, 6>(product, unpacked, chunk, row + done, done);
        break;
    }
    done += size;
  }
}

// At most kRowChunk rows by up to kWidePanels panels.
template <WeightFormat F>
void wide_panels(const Product& product, Unpacked& unpacked, int row, int count, int panel,
                 int panels) {
  constexpr FormatShape kShape = shape_of(F);
  const int blocks = product.weights.columns / kBlockColumns;
  const int chunks = (blocks + kMostChunkBlocks - 1) / kMostChunkBlocks;
  // A missing second panel repeats the first; its outputs are not stored.
  Blocks<F> first(product.panel(panel), product.weights.head_blocks);
  Blocks<F> second(product.panel(panel + panels - 1), product.weights.head_blocks);
  Chunk chunk{panel, panels, 0, 0, false, {}, kShape.block_bytes};
  for (int left = chunks; left > 0; --left, chunk.block += chunk.blocks) {
    chunk.blocks = (blocks - chunk.block + left - 1) / left;
    chunk.last = left == 1;
    unpack_blocks<F>(first, chunk, 0, unpacked);
    if constexpr (kWidePanels == 2) unpack_blocks<F>(second, chunk, 1, unpacked);
    // Behind the last block of a panel lies the next panel, which for two panels is in work too.
    const size_t skip = chunk.last ? product.weights.panel_bytes * (kWidePanels - 1) : 0;
    chunk.ahead[0] = first.next + skip;
    if constexpr (kWidePanels == 2) chunk.ahead[1] = second.next + skip;
    wide_rows<kShape.mins, kShape.halves>(product, unpacked, chunk, row, count);
  }
}

// Few rows read the packed codes as they go by; for more, unpacking them first pays.
template <WeightFormat F>
void product_of_codes(const Product& product, int row, int row_end, int panel, int panel_end) {
  switch (row_end - row) {
    case 1:
      return direct_rows<F, 1>(product, row, panel, panel_end);
    case 2:
      return direct_rows<F, 2>(product, row, panel, panel_end);
    case 3:
      if constexpr (kMostDirectRows >= 3) return direct_rows<F, 3>(product, row, panel, panel_end);
      break;
    case 4:
      if constexpr (kMostDirectRows >= 4) return direct_rows<F, 4>(product, row, panel, panel_end);
      break;
    case 8:
      if constexpr (kMostDirectRows >= 8) return direct_rows<F, 8>(product, row, panel, panel_end);
  }
  Unpacked unpacked;
  for (; row < row_end; row += kRowChunk) {
    const int count = row_end - row < kRowChunk ? row_end - row : kRowChunk;
    for (int p = panel; p < panel_end; p += kWidePanels)
      wide_panels<F>(product, unpacked, row, count, p,
                     panel_end - p < kWidePanels ? 1 : kWidePanels);
  }
}

// P panels at a time: independent sums, so that they do not wait for one another.
template <WeightFormat F, int M, int P>
void float_rows(const Product& product, int row, int panel, int panel_end) {
  for (; panel + P <= panel_end; panel += P) float_tile<F, M, P>(product, row, panel);
  for (; panel < panel_end; ++panel) float_tile<F, M, 1>(product, row, panel);
}

template <WeightFormat F>
void product_of_floats(const Product& product, int row, int row_end, int panel, int panel_end) {
  constexpr int kMost = kMostDirectRows;
  for (; row + kMost <= row_end; row += kMost)
    float_rows<F, kMost, kWidePanels>(product, row, panel, panel_end);
  for (; row + 2 <= row_end; row += 2) float_rows<F, 2, 2>(product, row, panel, panel_end);
  if (row < row_end) float_rows<F, 1, 4>(product, row, panel, panel_end);
}

void matmul_lanes(const PackedMatrix& weights, const QuantizedRows& activations, int row_begin,
                  int row_end, int panel_begin, int panel_end, float* out, size_t out_pitch,
                  bool add) {
  if (row_begin >= row_end) return;
  const Product product{weights, activations, out, out_pitch, add};
#define TRIPTYCH_CASE(format, kind) \
  case WeightFormat::format:        \
    return kind<WeightFormat::format>(product, row_begin, row_end, panel_begin, panel_end)
  switch (weights.format) {
    TRIPTYCH_CASE(kQ4_0, product_of_codes);
    TRIPTYCH_CASE(kQ4_1, product_of_codes);
    TRIPTYCH_CASE(kQ5_0, product_of_codes);
    TRIPTYCH_CASE(kQ5_1, product_of_codes);
    TRIPTYCH_CASE(kQ8_0, product_of_codes);
    TRIPTYCH_CASE(kQ4_K, product_of_codes);
    TRIPTYCH_CASE(kQ5_K, product_of_codes);
    TRIPTYCH_CASE(kQ6_K, product_of_codes);
    TRIPTYCH_CASE(kInt4, product_of_codes);
    TRIPTYCH_CASE(kInt8, product_of_codes);
    TRIPTYCH_CASE(kF32, product_of_floats);
    TRIPTYCH_CASE(kF16, product_of_floats);
    TRIPTYCH_CASE(kBF16, product_of_floats);
  }
#undef TRIPTYCH_CASE
}

void quantize_block(const float* x, float limit, QuantizedBlock& out) {
  const uint32_t largest = largest_magnitude(x);  // as bits: NaN above infinity above all numbers
  const bool finite = largest < 0x7F800000;
  float peak;
  __builtin_memcpy(&peak, &largest, sizeof peak);
  const bool zero = peak < kSmallestPeak;
  out.scale = !finite ? __builtin_nanf("") : zero ? 0.0f : peak / limit;
  out.code_sum = store_codes(x, zero ? 0.0f : limit / peak, finite, out.codes);
  out.sum = out.scale * static_cast<float>(out.code_sum);
}

void quantize_rows_lanes(const float* x, size_t pitch, int rows, int row_begin,
                         const QuantizedRows& out) {
  QuantizedBlock* to = out.blocks + static_cast<size_t>(row_begin) * out.block_pitch;
  for (int row = 0; row < rows; ++row, x += pitch, to += out.block_pitch)
    for (int block = 0; block < out.columns / kBlockColumns; ++block)
      quantize_block(x + block * kBlockColumns, static_cast<float>(out.limit), to[block]);
}

}  // namespace
}  // namespace triptych
