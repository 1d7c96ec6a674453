#include "lanes_scalar.h"
// The lanes come first: what follows is written on them.
#include "sampler_lanes_scalar.h"
// And the body on both.
#include "sampler_body.h"

namespace triptych {

const SamplerKernels kSamplerScalar = kSampler;

}  // namespace triptych
