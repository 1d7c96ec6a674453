#include "lanes_avx512.h"
// The lanes come first: the body is written on them.
#include "attention_body.h"

namespace triptych {

const AttentionKernels kAttentionAvx512 = kAttention;

}  // namespace triptych
