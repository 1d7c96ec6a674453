#include "matmul.h"

namespace triptych {
namespace {

size_t blocks_of(int columns) {
  return (static_cast<size_t>(columns) + kBlockColumns - 1) / kBlockColumns;
}

}  // namespace

size_t quantized_bytes(int rows, int columns) {
  return static_cast<size_t>(rows) * blocks_of(columns) * sizeof(QuantizedBlock);
}

QuantizedRows place_quantized_rows(void* memory, int columns) {
  return {static_cast<QuantizedBlock*>(memory), blocks_of(columns), nullptr, 0, columns};
}

}  // namespace triptych
