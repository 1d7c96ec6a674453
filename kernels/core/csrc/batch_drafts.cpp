// Guesses: computed behind a sequence's own tokens, taken as far as they are what is drawn.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "batch.h"
#include "errors.h"

namespace triptych {

void Batch::Draft(int64_t id, std::vector<int32_t> tokens) {
  RunningSequence& sequence = Find(id);
  Require(!step_.written, "draft: the step is written");
  const auto require = [id](bool holds, const char* otherwise) {
    if (!holds) throw BrokenInvariant("draft: sequence " + std::to_string(id) + otherwise);
  };
  require(!sequence.rules.held, " is held");
  require(sequence.num_tokens() > sequence.rules.num_prompt, " has no output token");
  const auto is_known = [](int32_t token) { return token > kUnknownDraft; };
  const auto is_guess = [](int32_t token) { return token >= kUnknownDraft; };
  require(std::all_of(tokens.begin(), tokens.end(), is_guess), " has a guess below -1");
  require(std::is_partitioned(tokens.begin(), tokens.end(), is_known),
          " has a known guess behind an unknown one");
  sequence.guesses = std::move(tokens);
  guessed_ = true;
}

void Batch::PlanDrafts(int64_t tokens_left) {
  for (Row& row : step_.rows) {
    RunningSequence* sequence = row.sequence;
    if (!row.samples || sequence->guesses.empty()) continue;
    const int32_t num_tokens = sequence->num_tokens();
    const int64_t wanted = std::min({static_cast<int64_t>(sequence->guesses.size()), tokens_left,
                                     step_.logits_left, sequence->most_tokens() - num_tokens - 1});
    if (wanted < 1) continue;
    const int32_t end = num_tokens + static_cast<int32_t>(wanted);
    const int32_t count = tables_.Extend(&sequence->table, end) - num_tokens;
    step_.AddDrafts(&row, sequence->guesses.data(), count);
    tokens_left -= count;
    step_.logits_left -= count;
  }
  step_.Renumber();
}

// What was taken for drafts, or tokens that nobody knows yet, of a step that is not computed is
// given back.
void Batch::DropUnknown() {
  if (step_.drafts.empty() && !step_.ahead) return;
  for (const Row& row : step_.rows) {
    RunningSequence* sequence = row.sequence;
    if (!sequence->closed && sequence->ahead_row == kNoRow)
      tables_.Trim(&sequence->table, sequence->num_tokens());
  }
}

void Batch::ForgetGuesses() {
  if (!guessed_) return;
  for (RunningSequence* sequence : order_) sequence->guesses.clear();
  guessed_ = false;
}

void Batch::FillDrafts(const std::vector<int32_t>& tokens) {
  Require(step_.written, "fill_drafts: the step is not written");
  auto& drafts = step_.drafts;
  const auto unknown = std::count(drafts.begin(), drafts.end(), kUnknownDraft);
  if (static_cast<int64_t>(tokens.size()) != unknown) {
    throw std::invalid_argument("drafts: " + std::to_string(tokens.size()) + " token ids, " +
                                std::to_string(unknown) + " are unknown");
  }
  const auto least = std::min_element(tokens.begin(), tokens.end());
  if (least != tokens.end() && *least < 0) {
    throw std::invalid_argument("drafts: token id " + std::to_string(*least) + " is below 0");
  }
  auto next = tokens.begin();
  for (int32_t& draft : drafts) {
    if (draft == kUnknownDraft) draft = *next++;
  }
}

// Into outcome_.samples: those whose token is taken, and the first of each sequence that takes
// none.
void Batch::CollectTaken(const std::vector<int32_t>& tokens, const std::vector<int32_t>& complete) {
  std::vector<int32_t>& taken = outcome_.samples;
  if (step_.drafts.empty()) {
    taken.resize(tokens.size());
    std::iota(taken.begin(), taken.end(), 0);
    return;
  }
  taken.clear();
  bool goes_on = true;
  for (size_t i = 0, first = 0; i < tokens.size(); ++i) {
    const auto& [sequence, logits_row, draft] = samples_[i];
    if (goes_on) {
      taken.push_back(static_cast<int32_t>(i));
      const auto count = sequence->num_tokens() + static_cast<int64_t>(i - first) + 1;
      goes_on = sequence->wanted() && tokens[i] == draft &&
                sequence->FinishAt(count, tokens[i]) == kFinishNone &&
                !Contains(complete, static_cast<int32_t>(i));
    }
    if (draft == kNoDraft) {  // the sequence's last sample
      goes_on = true;
      first = i + 1;
    }
  }
}

}  // namespace triptych
