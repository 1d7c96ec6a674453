// The forward pass of a Llama-like model over packed weights: built once, then one call per step
// that allocates nothing and takes no lock. A token's numbers depend on its own sequence only: not
// on the other rows, nor on how a prompt was cut, nor on threads or instruction set.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_items.h"
#include "dispatch.h"
#include "elementwise.h"
#include "kv_cache.h"
#include "matmul.h"
#include "memory.h"
#include "thread_pool.h"

namespace triptych {

struct PlanShape {
  int vocabulary_size, hidden, intermediate, heads, max_length;
  int window;  // positions that a query sees; INT32_MAX for all
  float epsilon;
  Activation activation;
  int activation_limit;            // largest activation code
  std::vector<float> frequencies;  // radians per position, [head_dim / 2]
  KvShape kv;
};

// Views; the memory outlives the plan. Biases may be null.
struct LayerWeights {
  const float* attention_norm;
  PackedMatrix q, k, v, output;
  const float *q_bias, *k_bias, *v_bias;
  const float* mlp_norm;
  PackedMatrix gate, up, down;
};

struct PlanWeights {
  PackedMatrix embedding, head;
  const float* norm;
  std::vector<LayerWeights> layers;
};

class Plan {
 public:
  // Throws std::invalid_argument when weights contradict the shape, std::bad_alloc.
  Plan(PlanShape shape, PlanWeights weights, int threads, std::vector<int> affinity);

  // Makes room for steps of so many tokens. Throws std::bad_alloc.
  void reserve(int tokens);
  int reserved() const { return reserved_; }

  // Runs a step of at most reserved() tokens whose contents are in range. Row r's logits go to
  // logits + logits_rows[r] * pitch, for logits_rows[r] >= 0, which are different from another.
  void step(const StepView& step, float* logits, size_t pitch);

  // Cycles (of the time stamp counter) of thread 0 in each phase so far: embed, qkv, rotate,
  // attention, output, gate_up, down, head. All zero unless compiled with TRIPTYCH_PROFILE.
  const std::vector<uint64_t>& cycles() const { return cycles_; }

  int vocabulary_size() const { return shape_.vocabulary_size; }
  void pin_caller() const { pool_.pin_caller(); }
  size_t kv_bytes() const { return kv_.num_bytes(); }

 private:
  // Inputs of matrix products: as float32 and as codes.
  struct Inputs {
    float* floats;
    QuantizedRows rows;
  };
  struct Span {
    int begin, end;
  };
  static constexpr int kFewRows = 2;  // norming them takes less time than a barrier
  enum Phase { kEmbed, kQkv, kRotate, kAttention, kOutput, kGateUp, kDown, kHead, kPhases };

  void work(int thread);
  void embed(int thread);
  void layer(int thread, int index);
  void project_qkv(int thread, const LayerWeights& weights, const KvLayer& kv);
  void fetch_slots(int thread, const KvLayer& kv) const;
  void rotate_and_store(int thread, const LayerWeights& weights, const KvLayer& kv);
  void rotate_head(const LayerWeights& weights, const KvLayer& kv, int token, int head);
  void attend(int thread, int index, const KvLayer& kv);
  void merge(int thread);
  AttentionPlaces attention_places() const;
  void project_output(int thread, const LayerWeights& weights);
  void gate_up(int thread, const LayerWeights& weights);
  void down(const LayerWeights& weights, int thread);
  void head(int thread);

  // Norms `count` rows of hidden, at the tokens `which` (all in order when null), for every thread:
  // each takes its share and they meet, or, when there are few, each takes all and none waits.
  const Inputs& normalise(int thread, const float* norm, const int* which, int count);
  const Inputs& quantise_mixed(int thread, const PackedMatrix& weights);
  void multiply(const PackedMatrix& weights, const Inputs& inputs, int rows, Span panels,
                float* out, size_t pitch, bool add) const;
  Span share(int count, int thread, int unit = 1) const;
  bool few(int rows) const;
  void mark(int thread, Phase phase);

  PlanShape shape_;
  PlanWeights weights_;
  KvCache kv_;
  ThreadPool pool_;
  AttentionItems items_;
  const Kernels* kernels_ = nullptr;
  bool quantises_hidden_ = false;  // whether some matrix that multiplies `hidden` takes codes
  int hidden_, queries_, keys_, qkv_, heads_per_key_;  // sizes of a token's vectors
  std::vector<std::atomic<uint32_t>> next_item_;       // of each layer

  int reserved_ = 0;
  std::vector<Buffer> buffers_;
  float *x_ = nullptr, *projected_ = nullptr, *mixed_ = nullptr, *gate_ = nullptr, *up_ = nullptr;
  float *cosines_ = nullptr, *sines_ = nullptr, *partials_ = nullptr;
  Inputs normed_{}, mixed_inputs_{}, gated_{};
  std::vector<Inputs> few_normed_, few_mixed_;  // of each thread
  std::vector<float*> scratch_;                 // of each thread
  std::vector<int> sampled_, destinations_;     // tokens that sample, by where their logits go

  StepView step_{};
  float* logits_ = nullptr;
  size_t logits_pitch_ = 0;
  std::vector<uint64_t> cycles_;
  uint64_t marked_ = 0;
};

}  // namespace triptych
