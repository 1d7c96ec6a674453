#include "matmul.h"

namespace triptych {
namespace {

size_t blocks_of(int columns) {
  return (static_cast<size_t>(columns) + kBlockColumns - 1) / kBlockColumns;
}

}  // namespace

size_t quantized_bytes(int rows, int columns) {
  static_assert(sizeof(ByteBlock) <= sizeof(QuantizedBlock));
  return static_cast<size_t>(rows) * blocks_of(columns) * sizeof(QuantizedBlock);
}

QuantizedRows place_quantized_rows(void* memory, int columns, int limit) {
  return {static_cast<QuantizedBlock*>(memory),
          static_cast<ByteBlock*>(memory),
          blocks_of(columns),
          nullptr,
          0,
          columns,
          limit};
}

QuantizedRows quantized_columns(const QuantizedRows& rows, int begin, int end) {
  QuantizedRows part = rows;
  part.blocks += begin / kBlockColumns;
  part.bytes += begin / kBlockColumns;
  part.columns = end - begin;
  return part;
}

}  // namespace triptych
