// What the sampler keeps of a sequence, and how it changes the sequence's logits before they are
// drawn from. docs/sampling.md has the order of the steps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sampler_filters.h"

namespace triptych {

struct SequenceParams {
  float temperature = 1.0f;  // 0: greedy
  Filters filters;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  uint32_t no_repeat_ngram_size = 0;
  uint64_t seed = 0;
  uint32_t choice = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  bool restricted = false;  // to allowed_token_ids
  std::vector<int32_t> allowed_token_ids;
  std::vector<std::vector<int32_t>> bad_words;  // none of them empty
  std::vector<int32_t> masked_token_ids;
  uint32_t mask_until = 0;
  int64_t logprobs = -1;
};

class SequenceState {
 public:
  // Ids outside 0 .. vocabulary_size - 1 have no effect.
  SequenceState(SequenceParams params, uint32_t vocabulary_size,
                const std::vector<int32_t>& prompt_ids, const std::vector<int32_t>& output_ids);

  void append(int32_t token_id);

  const SequenceParams& params() const { return params_; }

  // How many tokens are out.
  uint32_t position() const { return position_; }

  // Whether the next row is drawn from as it is.
  bool leaves_rows_alone() const;

  // The row that is drawn from. `allowed_mask` (or null): bit id % 32 of word id / 32 is set where
  // the id may follow.
  void modify(const float* logits, const uint32_t* allowed_mask, std::vector<float>& row) const;

 private:
  struct Seen {
    int32_t token_id;
    uint32_t outputs;  // 0: in the prompt only
  };

  bool counts() const;
  void count(int32_t token_id, uint32_t outputs);
  void restrict(const float* logits, const uint32_t* allowed_mask, std::vector<float>& row) const;
  void ban_words(std::vector<float>& row) const;
  void ban_repeats(std::vector<float>& row) const;
  void penalize(std::vector<float>& row) const;
  bool known(int32_t token_id) const;

  SequenceParams params_;
  uint32_t vocabulary_size_;
  uint32_t position_ = 0;
  bool keeps_history_;            // of the output, for bad words and n-grams
  std::vector<int32_t> history_;  // the prompt comes first where n-grams need it
  size_t history_prompt_ = 0;     // how much of it is prompt
  std::vector<Seen> seen_;        // each id once
  std::unordered_map<int32_t, size_t> seen_at_;
};

}  // namespace triptych
