#include "lanes_avx512.h"
// The lanes come first: what follows is written on them.
#include "sampler_lanes_avx512.h"
// And the body on both.
#include "sampler_body.h"

namespace triptych {

const SamplerKernels kSamplerAvx512 = kSampler;

}  // namespace triptych
