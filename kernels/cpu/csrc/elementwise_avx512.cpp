#include "lanes_avx512.h"
// The lanes come first: the body is written on them.
#include "elementwise_body.h"

namespace triptych {

const ElementwiseKernels kElementwiseAvx512 = kElementwise;

}  // namespace triptych
