#include "lanes_scalar.h"
// The lanes come first: the body is written on them.
#include "elementwise_body.h"

namespace triptych {

const ElementwiseKernels kElementwiseScalar = kElementwise;

}  // namespace triptych
