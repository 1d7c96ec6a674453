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
#include "panel_shares.h"
#include "thread_pool.h"

namespace triptych {

// Largest activation codes, by what the activations are multiplied with: see matmul.h.
struct ActivationLimits {
  int qkv, output, gate_up, down, head;
};

struct PlanShape {
  int vocabulary_size, hidden, intermediate, heads, max_length;
  int window;  // positions that a query sees; INT32_MAX for all
  float epsilon;
  float attention_soft_cap, logits_soft_cap;  // 0 for none
  Activation activation;
  ActivationLimits limits;
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
  // Where not null, column c of the matrices is for input order[c] (act order of GPTQ).
  const int32_t *qkv_order, *output_order, *mlp_order;
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

  // Copies blocks, then runs a step of at most reserved() tokens whose contents are in range. The
  // logits of token logits_tokens[i] go to logits + i * pitch; the tokens differ from one another.
  void step(const StepView& step, float* logits, size_t pitch);

  // Cycles (of the time stamp counter) of thread 0 in each phase so far: embed, qkv, rotate,
  // attention, output, gate_up, down, head. All zero unless compiled with TRIPTYCH_PROFILE.
  const std::vector<uint64_t>& cycles() const { return cycles_; }

  int vocabulary_size() const { return shape_.vocabulary_size; }
  void pin_caller() const { pool_.pin_caller(); }
  size_t kv_bytes() const { return kv_.num_bytes(); }

 private:
  // Inputs of matrix products that this class writes as float32, and as codes.
  struct Inputs {
    float* floats;
    QuantizedRows rows;
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
  void cap_logits(Span panels);

  // Norms `count` rows of hidden, at the tokens `which` (all in order when null), for every thread:
  // each takes its share and they meet, or, when there are few, each takes all and none waits.
  QuantizedRows normalise(int thread, const float* norm, const int* which, int count,
                          const int32_t* order, int limit);
  QuantizedRows quantise_mixed(int thread, const PackedMatrix& weights, const int32_t* order);
  void multiply(const PackedMatrix& weights, const QuantizedRows& inputs, Span rows, Span panels,
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
  Inputs normed_{};  // of several roles, which know their limits
  QuantizedRows mixed_inputs_{}, gated_{};
  std::vector<Inputs> few_normed_;           // of each thread
  std::vector<QuantizedRows> few_mixed_;     // of each thread
  std::vector<float*> scratch_, reordered_;  // of each thread

  StepView step_{};
  float* logits_ = nullptr;
  size_t logits_pitch_ = 0;
  std::vector<uint64_t> cycles_;
  uint64_t marked_ = 0;
};

}  // namespace triptych
