#include "lanes_scalar.h"
// The lanes come first: the body is written on them.
#include "attention_body.h"

namespace triptych {

const AttentionKernels kAttentionScalar = kAttention;

}  // namespace triptych
