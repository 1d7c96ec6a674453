#include "lanes_avx2.h"
// The lanes come first: the body is written on them.
#include "elementwise_body.h"

namespace triptych {

const ElementwiseKernels kElementwiseAvx2 = kElementwise;

}  // namespace triptych
