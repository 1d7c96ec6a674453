// The blocks of quantised weights in GGUF files.
#pragma once
#include <cstdint>

#include "packed_matrix.h"

namespace triptych {

struct GgmlBlock {
  int columns, bytes;
};

// 32 columns of a block.
struct GgmlCodes {
  uint8_t codes[kBlockColumns];  // as stored: unsigned, but int8 for Q8_0 and Q6_K (less 32)
  uint8_t scales[2];             // K-quants: integer scale of the 32 columns (Q6_K: int8 per 16)
  uint8_t min;                   // Q4_K, Q5_K
  uint16_t d, m;                 // f16; m is -dmin in K-quants
};

GgmlBlock ggml_block(WeightFormat format);

// Of the block that starts at `block`: its columns from 32 * part (part is ignored for blocks of
// 32). Quantised formats only.
GgmlCodes read_ggml_codes(WeightFormat format, const uint8_t* block, int part);

}  // namespace triptych
