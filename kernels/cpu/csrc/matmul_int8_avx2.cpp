// Compiled with AVX2, FMA and F16C flags.
// clang-format off: each is written in the terms of the one before
#include "machine_limits.h"
#include "matmul_lanes_avx2.h"
#include "matmul_tile.h"
#include "matmul_int8_lanes_avx2.h"
// clang-format on

namespace triptych {
namespace {

constexpr const MatmulKernels& kFloatKernels = kMatmulAvx2;

}  // namespace
}  // namespace triptych

// clang-format off: as above
#include "matmul_int8_tile.h"
#include "matmul_int8_body.h"
// clang-format on

namespace triptych {

const MatmulKernels kMatmulInt8Avx2 = {quantize_bytes, matmul_bytes};
uint64_t multiply_add_bytes_avx2(uint64_t rounds) { return multiply_add_bytes(rounds); }

}  // namespace triptych
