// Weight matrices as the matmul kernels read them: panels of 16 rows (of outputs), each panel
// blocks of 32 columns in ascending order. The layout is the same for every instruction set.
// Included by the files that are compiled with AVX flags, so: no inline functions, no standard
// library beyond C's.
//
// Quantised formats, per panel and block (f16 scales; K-quants have a head per 8 blocks instead):
//   Q4_0 Q5_0 Q8_0   d f16[16] | codes
//   Q4_1 Q5_1        d f16[16] | m f16[16] | codes
//   Q4_K Q5_K        every 8 blocks: d f16[16] | -dmin f16[16]; then scale u8[16] | min u8[16] |
//   codes Q6_K             every 8 blocks: d f16[16]; then scale i8[2][16] (16 columns each) |
//   codes
//   Int4 Int8        every group: scale f16[16] | -zero f16[16], whole numbers; per block: codes
// Codes, where pair p = columns 2p and 2p + 1 of the block, lane = 2 * row + column % 2:
//   4 bits  u16 words[4][32]: nibble p % 4 of words[p / 4][lane]
//   5 bits  as 4 bits, then the fifth bits, u16 plane[32]: bit p of plane[lane]
//   8 bits  i8 bytes[16][32]: bytes[p][lane]
// Float formats, per panel: weights[columns][16], of the type's own size.
// Rows are padded with zeros to whole panels.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace triptych {

// Of the layout above: raise it with every change, and packed weights on disk are made anew.
constexpr int kPackedLayoutVersion = 1;

constexpr int kPanelRows = 16;
constexpr int kBlockColumns = 32;
constexpr int kSuperBlocks = 8;       // blocks under one head of a K-quant
constexpr int kPackedAlignment = 64;  // bytes, of PackedMatrix::data

// Numbered as GGML numbers its types, so that a file's type is the format.
enum class WeightFormat : int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
  // Not GGML's: groups of columns under one scale and zero point, weight = scale * (code - zero).
  kInt4 = 256,  // codes 0 to 15
  kInt8 = 257,  // codes -128 to 127
};

// A format, and for kInt4 and kInt8 the blocks of a group.
struct WeightType {
  WeightFormat format;
  int group_blocks = 0;
};

// A view; whoever packed it keeps the bytes. Matrices of one format and one `columns`, with rows
// that fill their panels, can be packed one behind the other and then read as one.
struct PackedMatrix {
  WeightFormat format;
  int rows, columns;
  size_t panel_bytes;
  const uint8_t* data;
  int head_blocks;  // blocks under one head; 0 where there are no heads
};

int panels_of(int rows);

// Whether the format's activations are 16-bit codes (quantised formats) or float32.
bool takes_codes(WeightFormat format);

// Of a type as Python writes it: GGML's number; for groups, WeightFormat + 65536 * blocks of a
// group. Throws std::invalid_argument for one that is not in WeightFormat.
WeightType weight_type_of(int number);

// A view of packed bytes at `data`. Throws std::invalid_argument when rows or columns are not
// positive, or columns are no multiple of the format's block (32; K-quants 256; floats 1; groups
// their size).
PackedMatrix packed_view(WeightType type, int rows, int columns, const uint8_t* data);

// Bytes of the matrix in a GGUF file (groups: of its codes), and packed. Both throw as packed_view
// does.
size_t source_bytes(WeightType type, int rows, int columns);
size_t packed_bytes(WeightType type, int rows, int columns);

// Repacks panels [panel_begin, panel_end) of a row-major matrix of GGML blocks at `source` (groups:
// see packed_groups.h).
// `matrix` is a packed_view over writable memory at `destination`. Panels are independent: threads
// may share the work.
void pack_panels(const PackedMatrix& matrix, const uint8_t* source, int panel_begin, int panel_end,
                 uint8_t* destination);

// The whole matrix; packed_bytes() bytes are written to `destination`.
PackedMatrix pack(WeightType type, const uint8_t* source, int rows, int columns,
                  uint8_t* destination);

// Row `row` as float32 [columns]: the values that GGML's own dequantisation gives, bit for bit;
// groups: scale * (code - zero), which is exact.
void unpack_row(const PackedMatrix& matrix, int row, float* out);

}  // namespace triptych
