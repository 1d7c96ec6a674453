#include "lanes_avx2.h"
// The lanes come first: the body is written on them.
#include "attention_body.h"

namespace triptych {

const AttentionKernels kAttentionAvx2 = kAttention;

}  // namespace triptych
