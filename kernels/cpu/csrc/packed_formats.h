// The parts of each quantised format, as constants: the layout in packed_matrix.h, in bytes.
// Included by the files that are compiled with AVX flags: constants only.
#pragma once
#include "packed_matrix.h"

namespace triptych {

struct FormatShape {
  int code_bits;    // 4, 5, 8; 16 or 32 for floats
  int offset;       // what is subtracted from a stored code
  bool mins;        // a minimum per block
  bool super;       // a head per kSuperBlocks blocks, integer scales per block
  bool grouped;     // a head per group of blocks, nothing per block
  int halves;       // scales per block and row
  int head_bytes;   // before the first of the blocks that it is for
  int scale_bytes;  // between a block's start and its codes
  int block_bytes;  // scales and codes of a block

  constexpr FormatShape(int bits, int offset, bool mins, bool super, int halves,
                        bool grouped = false)
      : code_bits(bits),
        offset(offset),
        mins(mins),
        super(super),
        grouped(grouped),
        halves(halves),
        head_bytes(super || grouped ? kPanelRows * 2 * (mins ? 2 : 1) : 0),
        scale_bytes(bits > 8 || grouped ? 0
                                        : kPanelRows * (super ? 1 : 2) * (halves + (mins ? 1 : 0))),
        block_bytes(scale_bytes + kPanelRows * kBlockColumns * bits / 8) {}
};

constexpr FormatShape shape_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_0:
      return {4, 8, false, false, 1};
    case WeightFormat::kQ4_1:
      return {4, 0, true, false, 1};
    case WeightFormat::kQ5_0:
      return {5, 16, false, false, 1};
    case WeightFormat::kQ5_1:
      return {5, 0, true, false, 1};
    case WeightFormat::kQ8_0:
      return {8, 0, false, false, 1};
    case WeightFormat::kQ4_K:
      return {4, 0, true, true, 1};
    case WeightFormat::kQ5_K:
      return {5, 0, true, true, 1};
    case WeightFormat::kQ6_K:
      return {8, 0, false, true, 2};
    case WeightFormat::kInt4:
      return {4, 0, true, false, 1, true};
    case WeightFormat::kInt8:
      return {8, 0, true, false, 1, true};
    case WeightFormat::kF32:
      return {32, 0, false, false, 1};
    case WeightFormat::kF16:
    case WeightFormat::kBF16:
      break;
  }
  return {16, 0, false, false, 1};
}

// Where block `block` of a panel starts, with a head per `head_blocks` (see PackedMatrix).
constexpr size_t block_offset(const FormatShape& shape, int head_blocks, int block) {
  const size_t heads = head_blocks > 0 ? static_cast<size_t>(block / head_blocks + 1) : 0;
  return heads * static_cast<size_t>(shape.head_bytes) +
         static_cast<size_t>(block) * static_cast<size_t>(shape.block_bytes);
}

// Where the head over block `block` starts, if there are heads.
constexpr size_t head_offset(const FormatShape& shape, int head_blocks, int block) {
  return block_offset(shape, head_blocks, block / head_blocks * head_blocks) -
         static_cast<size_t>(shape.head_bytes);
}

}  // namespace triptych
