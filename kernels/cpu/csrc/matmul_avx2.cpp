// Compiled with AVX2, FMA and F16C flags.
// clang-format off: each is written in the terms of the one before
#include "matmul_lanes_avx2.h"
#include "matmul_tile.h"
#include "matmul_body.h"
#include "machine_limits_body.h"
// clang-format on

namespace triptych {

const MatmulKernels kMatmulAvx2 = {quantize_rows_lanes, matmul_lanes};
const LimitKernels kLimitsAvx2 = {multiply_adds_lanes, multiply_add_bytes_avx2, read_lanes};

}  // namespace triptych
