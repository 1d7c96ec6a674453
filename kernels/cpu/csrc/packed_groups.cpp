#include "packed_groups.h"

#include <cstring>

#include "packed_block.h"
#include "packed_formats.h"

namespace triptych {
namespace {

constexpr uint16_t kSignOfHalf = 0x8000;

void pack_row(const PackedMatrix& matrix, const GroupSource& source, int row, uint8_t* panel) {
  const FormatShape shape = shape_of(matrix.format);
  const int blocks = matrix.columns / kBlockColumns, lane = row % kPanelRows;
  const size_t groups = static_cast<size_t>(blocks / matrix.head_blocks);
  const uint8_t* codes =
      source.codes + static_cast<size_t>(row) * static_cast<size_t>(matrix.columns);
  for (int block = 0; block < blocks; ++block, codes += kBlockColumns) {
    if (block % matrix.head_blocks == 0) {
      uint8_t* head = panel + head_offset(shape, matrix.head_blocks, block) + 2 * lane;
      const size_t group =
          static_cast<size_t>(row) * groups + static_cast<size_t>(block / matrix.head_blocks);
      const auto offset = static_cast<uint16_t>(source.zeros[group] ^ kSignOfHalf);
      std::memcpy(head, source.scales + group, 2);
      std::memcpy(head + 2 * kPanelRows, &offset, 2);
    }
    write_codes(matrix.format, codes, lane, panel + block_offset(shape, matrix.head_blocks, block));
  }
}

}  // namespace

void pack_groups(const PackedMatrix& matrix, const GroupSource& source, uint8_t* destination) {
  std::memset(destination, 0, matrix.panel_bytes * static_cast<size_t>(panels_of(matrix.rows)));
  for (int row = 0; row < matrix.rows; ++row)
    pack_row(matrix, source, row,
             destination + static_cast<size_t>(row / kPanelRows) * matrix.panel_bytes);
}

}  // namespace triptych
