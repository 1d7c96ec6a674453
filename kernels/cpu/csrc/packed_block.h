// One row of one block of a packed matrix in plain numbers: what unpack_row and the scalar kernels
// read. Not for the files that are compiled with AVX flags.
#pragma once
#include <cstdint>

#include "packed_matrix.h"

namespace triptych {

struct RowBlock {
  int32_t codes[kBlockColumns];  // offset applied
  float scales[2];               // of 16 columns each
  float min;                     // 0 where the format has none
};

// Of a quantised format. `row` counts within the panel.
RowBlock read_row_block(const PackedMatrix& matrix, int panel, int block, int row);

// Adds the codes (of 32 columns) of one row to a block whose codes at `block` are zero.
void write_codes(WeightFormat format, const uint8_t* codes, int row, uint8_t* block);

// Weight of a float format.
float read_weight(const PackedMatrix& matrix, int panel, int column, int row);

float float_of_half(uint16_t half);

}  // namespace triptych
