// Twin of engine_core/running.py: a running sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "blake2b.h"
#include "block_tables.h"

namespace triptych {

// engine_core/batch.py
constexpr int32_t kNotFinite = -1;
constexpr uint8_t kFinishNone = 0;
constexpr uint8_t kFinishStop = 1;
constexpr uint8_t kFinishLength = 2;
constexpr uint8_t kFinishNotFinite = 255;
constexpr int32_t kUnknownDraft = -1;
constexpr int32_t kNoDraft = kUnknownDraft - 1;

// Whether a number is among ascending ones, of which there are none mostly.
template <typename T>
bool Contains(const std::vector<T>& ascending, T number) {
  return !ascending.empty() && std::binary_search(ascending.begin(), ascending.end(), number);
}

// engine_core/batch.py SequenceRules
struct SequenceRules {
  int64_t request_id = 0;
  int64_t num_prompt = 0;
  int64_t max_tokens = 0;
  int64_t max_len = 0;
  std::vector<int64_t> stop_token_ids;  // ascending
  bool held = false;
  bool score_prompt = false;
  bool cached = true;
};

constexpr int32_t kNoRow = -1;

// What every step reads stands first: there is little else that a step costs.
struct RunningSequence {
  int64_t id;
  int32_t num_computed = 0;
  int32_t row = kNoRow;        // in the planned step: its own, or the one that it rides on
  int32_t ahead_row = kNoRow;  // in the step ahead
  bool cached = false;
  bool closed = false;
  std::vector<int32_t> tokens;
  SequenceRules rules;
  BlockTable table;
  std::vector<Digest> digests;   // the root and those of all whole blocks; empty if not cached
  std::vector<int32_t> guesses;  // of the tokens that follow, for the next plan

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  bool wanted() const { return !closed && !rules.held; }  // drawn tokens are taken
  int32_t num_lacking() const { return num_tokens() - num_computed; }

  int64_t most_tokens() const {
    return std::min(rules.max_len, rules.num_prompt + rules.max_tokens);
  }

  // What it means that a token is the sequence's `count`-th, and for now its last.
  uint8_t FinishAt(int64_t count, int32_t token) const {
    if (Contains(rules.stop_token_ids, int64_t{token})) return kFinishStop;
    return count >= most_tokens() ? kFinishLength : kFinishNone;
  }

  // Of the next `num_tokens`, behind `passed` that a step in flight computes.
  int64_t NumScored(int64_t num_tokens, int32_t passed = 0) const {
    if (!rules.score_prompt) return 0;
    return std::max<int64_t>(0, std::min(num_tokens, rules.num_prompt - 1 - num_computed - passed));
  }

  // Tokens of the next `num_tokens` that need no more than `num_logits` rows of logits.
  int64_t Fitting(int64_t num_tokens, int64_t num_logits, int32_t passed = 0) const {
    const int64_t scored = NumScored(num_tokens, passed);
    if (scored > num_logits) return num_logits;
    const bool samples = num_tokens == num_lacking() - passed;
    return scored + samples > num_logits ? num_tokens - 1 : num_tokens;
  }
};

}  // namespace triptych
