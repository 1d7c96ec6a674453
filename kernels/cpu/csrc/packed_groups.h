// Packing of kInt4 and kInt8: integer codes with a scale and a zero point per group of columns.
#pragma once
#include <cstdint>

#include "packed_matrix.h"

namespace triptych {

// A row-major matrix; what a checkpoint's own order was is the loader's to know.
struct GroupSource {
  const uint8_t* codes;    // [rows][columns]: 0..15, or int8
  const uint16_t* scales;  // f16 [rows][groups]
  const uint16_t* zeros;   // f16 [rows][groups], whole numbers
};

// Writes the whole of `matrix`, a packed_view over writable memory at `destination`.
void pack_groups(const PackedMatrix& matrix, const GroupSource& source, uint8_t* destination);

}  // namespace triptych
