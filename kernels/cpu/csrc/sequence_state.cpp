#include "sequence_state.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace triptych {
namespace {

constexpr float kNever = -HUGE_VALF;

// The logits of `count` ids whose bits are set. Goes from bit to bit over the rarer kind: a branch
// for each id would be guessed wrong half the time (200 us for 49,152 random bits; this takes 30).
void copy_allowed(const float* logits, uint32_t bits, uint32_t count, float* row) {
  if (__builtin_popcount(bits) <= 12) {
    std::fill(row, row + count, kNever);
    for (; bits != 0; bits &= bits - 1) {
      const auto at = static_cast<uint32_t>(__builtin_ctz(bits));
      if (at < count) row[at] = logits[at];
    }
    return;
  }
  std::copy(logits, logits + count, row);
  for (uint32_t banned = ~bits; banned != 0; banned &= banned - 1) {
    const auto at = static_cast<uint32_t>(__builtin_ctz(banned));
    if (at < count) row[at] = kNever;
  }
}

}  // namespace

SequenceState::SequenceState(SequenceParams params, uint32_t vocabulary_size,
                             const std::vector<int32_t>& prompt_ids,
                             const std::vector<int32_t>& output_ids)
    : params_(std::move(params)), vocabulary_size_(vocabulary_size) {
  const auto unknown = [&](int32_t id) { return !known(id); };
  const auto drop_unknown = [&](std::vector<int32_t>& ids) {
    ids.erase(std::remove_if(ids.begin(), ids.end(), unknown), ids.end());
  };
  drop_unknown(params_.allowed_token_ids);
  drop_unknown(params_.masked_token_ids);
  auto& bias = params_.logit_bias;
  bias.erase(
      std::remove_if(bias.begin(), bias.end(), [&](const auto& b) { return !known(b.first); }),
      bias.end());
  auto& words = params_.bad_words;
  words.erase(std::remove_if(words.begin(), words.end(),
                             [&](const auto& word) { return !known(word.back()); }),
              words.end());
  keeps_history_ =
      params_.no_repeat_ngram_size > 0 ||
      std::any_of(words.begin(), words.end(), [](const auto& w) { return w.size() > 1; });
  if (params_.no_repeat_ngram_size > 0) {
    history_ = prompt_ids;
    history_prompt_ = history_.size();
  }
  if (params_.repetition_penalty != 1.0f)
    for (const int32_t id : prompt_ids) count(id, 0);
  for (const int32_t id : output_ids) append(id);
}

bool SequenceState::known(int32_t token_id) const {
  return token_id >= 0 && static_cast<uint32_t>(token_id) < vocabulary_size_;
}

bool SequenceState::counts() const {
  return params_.repetition_penalty != 1.0f || params_.frequency_penalty != 0.0f ||
         params_.presence_penalty != 0.0f;
}

void SequenceState::count(int32_t token_id, uint32_t outputs) {
  if (!known(token_id)) return;
  const auto [at, added] = seen_at_.try_emplace(token_id, seen_.size());
  if (added) seen_.push_back({token_id, 0});
  seen_[at->second].outputs += outputs;
}

void SequenceState::append(int32_t token_id) {
  ++position_;
  if (keeps_history_) history_.push_back(token_id);
  if (counts()) count(token_id, 1);
}

bool SequenceState::leaves_rows_alone() const {
  return !params_.restricted && params_.bad_words.empty() && params_.no_repeat_ngram_size == 0 &&
         params_.logit_bias.empty() && seen_.empty() &&
         (params_.masked_token_ids.empty() || position_ >= params_.mask_until);
}

void SequenceState::modify(const float* logits, const uint32_t* allowed_mask,
                           std::vector<float>& row) const {
  restrict(logits, allowed_mask, row);
  ban_words(row);
  ban_repeats(row);
  if (position_ < params_.mask_until)
    for (const int32_t id : params_.masked_token_ids) row[static_cast<size_t>(id)] = kNever;
  for (const auto& [id, bias] : params_.logit_bias) row[static_cast<size_t>(id)] += bias;
  penalize(row);
}

void SequenceState::restrict(const float* logits, const uint32_t* allowed_mask,
                             std::vector<float>& row) const {
  if (params_.restricted) {
    row.assign(vocabulary_size_, kNever);
    for (const int32_t allowed : params_.allowed_token_ids) {
      const auto id = static_cast<uint32_t>(allowed);
      if (allowed_mask == nullptr || (allowed_mask[id / 32] >> (id % 32) & 1)) row[id] = logits[id];
    }
    return;
  }
  if (allowed_mask == nullptr) {
    row.assign(logits, logits + vocabulary_size_);
    return;
  }
  row.resize(vocabulary_size_);
  for (uint32_t begin = 0; begin < vocabulary_size_; begin += 32)
    copy_allowed(logits + begin, allowed_mask[begin / 32], std::min(32u, vocabulary_size_ - begin),
                 row.data() + begin);
}

// As in vLLM, the tokens in front are looked for in the output only.
void SequenceState::ban_words(std::vector<float>& row) const {
  for (const std::vector<int32_t>& word : params_.bad_words) {
    const size_t before = word.size() - 1;
    if (before > history_.size() - history_prompt_) continue;
    if (std::equal(word.begin(), word.end() - 1,
                   history_.end() - static_cast<std::ptrdiff_t>(before)))
      row[static_cast<size_t>(word.back())] = kNever;
  }
}

// A scan: at any length that a model has, it reads less than the row that was just copied.
void SequenceState::ban_repeats(std::vector<float>& row) const {
  const size_t size = params_.no_repeat_ngram_size;
  if (size == 0 || history_.size() < size) return;
  const int32_t* prefix = history_.data() + history_.size() - (size - 1);
  for (size_t last = size - 1; last < history_.size(); ++last) {
    const int32_t* start = history_.data() + last - (size - 1);
    if (known(history_[last]) && std::equal(start, start + size - 1, prefix))
      row[static_cast<size_t>(history_[last])] = kNever;
  }
}

void SequenceState::penalize(std::vector<float>& row) const {
  for (const Seen& seen : seen_) {
    float& logit = row[static_cast<size_t>(seen.token_id)];
    if (logit > 0.0f)
      logit /= params_.repetition_penalty;
    else
      logit *= params_.repetition_penalty;
    if (seen.outputs == 0) continue;
    logit -= params_.frequency_penalty * static_cast<float>(seen.outputs);
    logit -= params_.presence_penalty;
  }
}

}  // namespace triptych
