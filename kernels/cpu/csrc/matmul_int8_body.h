// The matmul kernels over the tiles of matmul_int8_tile.h; included last by each instruction set's
// file, which has named in kFloatKernels whose products of float weights are taken. The rule at the
// top of matmul.h holds here.
namespace triptych {
namespace {

// `size` rows, at most M.
template <class Shape, int M>
void wide_byte_rows_of(const Product& product, UnpackedBytes& unpacked, const Chunk& chunk, int row,
                       int work, int size) {
  if (size == M) return wide_byte_tile<Shape, M>(product, unpacked, chunk, row, work);
  if constexpr (M > 1) wide_byte_rows_of<Shape, M - 1>(product, unpacked, chunk, row, work, size);
}

// At most kByteRowChunk rows by up to kWidePanels panels.
template <WeightFormat F>
void wide_byte_panels(const Product& product, UnpackedBytes& unpacked, int row, int count,
                      int panel, int panels) {
  using Shape = TileShape<F>;
  constexpr int kMostRows = wide_byte_rows(Shape::kBits);
  const int blocks = product.weights.columns / kBlockColumns;
  const int chunks = (blocks + kMostByteChunkBlocks - 1) / kMostByteChunkBlocks;
  const int tiles = (count + kMostRows - 1) / kMostRows;
  // A missing second panel repeats the first; its outputs are not stored.
  Blocks<F> first(product.panel(panel), product.weights.head_blocks);
  Blocks<F> second(product.panel(panel + panels - 1), product.weights.head_blocks);
  Chunk chunk{panel, panels, 0, 0, false, {}, Shape::kShape.block_bytes};
  for (int left = chunks; left > 0; --left, chunk.block += chunk.blocks) {
    chunk.blocks = (blocks - chunk.block + left - 1) / left;
    chunk.last = left == 1;
    unpack_bytes(first, chunk, 0, unpacked);
    if constexpr (kWidePanels == 2) unpack_bytes(second, chunk, 1, unpacked);
    // Behind the last block of a panel lies the next panel, which for two panels is in work too.
    const size_t skip = chunk.last ? product.weights.panel_bytes * (kWidePanels - 1) : 0;
    chunk.ahead[0] = first.next + skip;
    if constexpr (kWidePanels == 2) chunk.ahead[1] = second.next + skip;
    for (int tile = 0, done = 0; tile < tiles; ++tile) {  // of about the same size
      const int size = (count - done + tiles - tile - 1) / (tiles - tile);
      wide_byte_rows_of<Shape, kMostRows>(product, unpacked, chunk, row + done, done, size);
      done += size;
    }
  }
}

template <WeightFormat F, int M>
bool direct_byte_rows_of(const Product& product, int row, int rows, int panel, int panel_end) {
  if (rows == M) {
    for (; panel < panel_end; ++panel) direct_byte_tile<F, M>(product, row, panel);
    return true;
  }
  if constexpr (M > 1)
    return direct_byte_rows_of<F, M - 1>(product, row, rows, panel, panel_end);
  else
    return false;
}

// Few rows read the packed codes as they go by; for more, unpacking them first pays.
template <WeightFormat F>
void product_of_bytes(const Product& product, int row, int row_end, int panel, int panel_end) {
  constexpr int kMostDirect = direct_byte_rows(shape_of(F).code_bits);
  if (direct_byte_rows_of<F, kMostDirect>(product, row, row_end - row, panel, panel_end)) return;
  UnpackedBytes unpacked;
  for (; row < row_end; row += kByteRowChunk) {
    const int count = row_end - row < kByteRowChunk ? row_end - row : kByteRowChunk;
    for (int p = panel; p < panel_end; p += kWidePanels)
      wide_byte_panels<F>(product, unpacked, row, count, p,
                          panel_end - p < kWidePanels ? 1 : kWidePanels);
  }
}

void matmul_bytes(const PackedMatrix& weights, const QuantizedRows& activations, int row_begin,
                  int row_end, int panel_begin, int panel_end, float* out, size_t out_pitch,
                  bool add) {
  if (row_begin >= row_end) return;
  const Product product{weights, activations, out, out_pitch, add};
#define TRIPTYCH_CASE(format)                                                               \
  case WeightFormat::format:                                                                \
    return product_of_bytes<WeightFormat::format>(product, row_begin, row_end, panel_begin, \
                                                  panel_end)
  switch (weights.format) {
    TRIPTYCH_CASE(kQ4_0);
    TRIPTYCH_CASE(kQ4_1);
    TRIPTYCH_CASE(kQ5_0);
    TRIPTYCH_CASE(kQ5_1);
    TRIPTYCH_CASE(kQ8_0);
    TRIPTYCH_CASE(kQ4_K);
    TRIPTYCH_CASE(kQ5_K);
    TRIPTYCH_CASE(kQ6_K);
    TRIPTYCH_CASE(kInt4);
    TRIPTYCH_CASE(kInt8);
    default:  // floats
      kFloatKernels.matmul(weights, activations, row_begin, row_end, panel_begin, panel_end, out,
                           out_pitch, add);
  }
#undef TRIPTYCH_CASE
}

void quantize_block(const float* x, float limit, ByteBlock& out) {
  const uint32_t largest = largest_magnitude(x);  // as bits: NaN above infinity above all numbers
  const bool finite = largest < 0x7F800000;
  float peak;
  __builtin_memcpy(&peak, &largest, sizeof peak);
  const bool zero = peak < kSmallestPeak;
  out.scale = !finite ? __builtin_nanf("") : zero ? 0.0f : peak / limit;
  int32_t sums[2];
  store_byte_codes(x, zero ? 0.0f : limit / peak, finite, out.codes, sums);
  out.minus_sums[0] = -(sums[0] + sums[1]);
  out.minus_sums[1] = -sums[0];
  out.minus_sums[2] = -sums[1];
  out.sum = out.scale * static_cast<float>(sums[0] + sums[1]);
}

void quantize_bytes(const float* x, size_t pitch, int rows, int row_begin,
                    const QuantizedRows& out) {
  ByteBlock* to = out.bytes + static_cast<size_t>(row_begin) * out.block_pitch;
  for (int row = 0; row < rows; ++row, x += pitch, to += out.block_pitch)
    for (int block = 0; block < out.columns / kBlockColumns; ++block)
      quantize_block(x + block * kBlockColumns, static_cast<float>(out.limit), to[block]);
}

// As multiply_adds of LimitKernels, of bytes.
uint64_t multiply_add_bytes(uint64_t rounds) {
  constexpr int kBits = 4;  // the cheapest
  constexpr int kChains = wide_byte_rows(kBits) * kWidePanels;
  static const uint8_t kOnes[4 * kPanelRows] = {1, 1, 1};
  static const int8_t kQuad[4] = {1, 1, 1, 1};
  Bytes codes = load_words(kOnes);
  const Quad quad = broadcast_quad(kQuad);
  ByteSums<kBits> sums[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i].start(0);
  for (uint64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) {
        touch(codes);  // or else one product would do for all sums
        sums[i].add(codes, quad, q);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) touch(sums[i].sums);
  return rounds * kQuads * kChains * kPanelRows * 4;
}

}  // namespace
}  // namespace triptych
