// The stateful sampler: sequences that are open, and a token for each row of a step. The contract
// is kernels/sampler_params.py's, the plain definition kernels/reference/sampler.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sampler_logprobs.h"
#include "sequence_state.h"

namespace triptych {

// So many masses of 2^44 at most still add up within 63 bits.
constexpr uint32_t kLargestVocabulary = (1u << 19) - 1;

struct Sample {
  const SequenceState* sequence;
  const float* logits;           // at least vocabulary_size
  const uint32_t* allowed_mask;  // or null
};

// One thread at a time.
class Sampler {
 public:
  Sampler(uint32_t vocabulary_size, bool processed_logprobs)
      : vocabulary_size_(vocabulary_size), processed_logprobs_(processed_logprobs) {}

  uint32_t vocabulary_size() const { return vocabulary_size_; }
  size_t open_sequences() const { return sequences_.size(); }

  // False: it is open already, and nothing happened.
  bool open(int64_t id, SequenceParams params, const std::vector<int32_t>& prompt_ids,
            const std::vector<int32_t>& output_ids);
  // False: it was not open.
  bool close(int64_t id) { return sequences_.erase(id) == 1; }
  // Null: not open. Stays where it is until it is closed.
  SequenceState* find(int64_t id);

  // Writes a token for each sample, -1 where none can be drawn, and gives the logprobs of the
  // samples that want them by index.
  std::vector<std::pair<size_t, TokenLogprobs>> draw(const std::vector<Sample>& samples,
                                                     const SamplerKernels& kernels,
                                                     int32_t* tokens);

  // By the row's own softmax. None where the row is not finite. `token` is below the vocabulary.
  std::optional<TokenLogprobs> score(const float* logits, uint32_t token, size_t top,
                                     const SamplerKernels& kernels);

 private:
  int32_t draw_one(const Sample& sample, const SamplerKernels& kernels, TokenLogprobs& logprobs);

  uint32_t vocabulary_size_;
  bool processed_logprobs_;
  std::unordered_map<int64_t, SequenceState> sequences_;
  Scratch scratch_;
};

}  // namespace triptych
