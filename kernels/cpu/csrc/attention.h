// Paged attention on the CPU: causal, grouped heads, sliding window, soft cap. One definition of
// the numbers, which every instruction set and every way to split the work follows bit for bit:
//   score(query, token) = sum over d ascending of fma(q[d], k[d], sum), queries being scaled before
//   score = cap * tanh(score / cap), where there is a cap
//   softmax online over chunks of 64 positions within partitions of 512, partitions merged
//   ascending output[d] = sum over tokens ascending of fma(p, v[d], sum), tokens out of sight never
//   read
// Borders lie at multiples of the absolute position, so that they do not depend on how a prompt was
// cut. With int8 the scores are multiplied by the key's scale, p by the value's.
//
// Included by the files that are compiled with AVX flags: no inline functions, C's library only.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace triptych {

constexpr int kLanes = 16;
constexpr int kChunk = 64;       // positions of one softmax step
constexpr int kPartition = 512;  // positions of one independent part
constexpr int kTileTokens = 32;  // most queries of a sequence in one AttentionWork

enum class KvType : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// One layer of the cache: a block of tokens (a multiple of 16) holds, for each head behind another,
//   keys    [head_dim][block_size]                  lanes are tokens
//   values  [block_size][value_pitch(head_dim)]     lanes are dimensions
//   scales  int8 only: float of keys [block_size], of values [block_size]
// so that what a head reads of a block is one run of memory.
struct KvLayer {
  uint8_t* data;                                                   // of block 0
  size_t block_stride, head_stride, values_offset, scales_offset;  // bytes
  KvType type;
  int head_dim, block_size;
};

// Queries of neighbouring tokens of one sequence, at most kTileTokens, for the query heads of one
// kv head.
struct AttentionWork {
  const float* q;  // head h of token t at q + t * q_pitch + h * head_dim
  size_t q_pitch;
  float* out;  // the same places in the output
  size_t out_pitch;
  const int32_t* blocks;  // of the sequence
  int tokens, heads, kv_head, first_position;
  int window;      // positions that a query sees, its own among them; INT32_MAX for all
  float soft_cap;  // bound of the scores; 0 for none
  int partition;   // the only one to compute, into `partials`; -1 for all, into `out`
  float* partials;
};

struct AttentionKernels {
  // Stores a token's key and value [head_dim] of one head.
  void (*store)(const KvLayer& layer, int block, int offset, int kv_head, const float* key,
                const float* value);

  // `next` (or null) is what this thread attends to next: memory can fetch what that begins with.
  // `scratch`: attention_scratch() floats, 64-byte aligned.
  void (*attend)(const KvLayer& layer, const AttentionWork& work, const AttentionWork* next,
                 float* scratch);

  // Joins `count` >= 1 partials of one query head, `stride` floats apart, into out [head_dim].
  // `total` is partial_floats() of scratch.
  void (*merge)(const float* partials, int count, size_t stride, int head_dim, float* total,
                float* out);
};

int value_pitch(int head_dim);

// Floats of one partial: peak, mass, sums [value_pitch].
size_t partial_floats(int head_dim);

// Floats of scratch for a work of `heads` query heads.
size_t attention_scratch(int head_dim, int heads);

// Bytes of one element.
size_t kv_bytes(KvType type);

extern const AttentionKernels kAttentionScalar;
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;

}  // namespace triptych
