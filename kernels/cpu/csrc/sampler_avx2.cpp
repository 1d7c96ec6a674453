#include "lanes_avx2.h"
// The lanes come first: what follows is written on them.
#include "sampler_lanes_avx2.h"
// And the body on both.
#include "sampler_body.h"

namespace triptych {

const SamplerKernels kSamplerAvx2 = kSampler;

}  // namespace triptych
