#include <algorithm>
#include <string>

#include "batch.h"
#include "errors.h"

namespace triptych {
namespace {

// Of the numbers and 0.
int32_t Least(const std::vector<int32_t>& numbers) {
  int32_t least = 0;
  for (const int32_t number : numbers) least = std::min(least, number);
  return least;
}

}  // namespace

// ------------------------------------------------------------------ the next step

bool Batch::Plan(int64_t budget, int64_t most_per_sequence, int64_t logits_budget) {
  Require(!step_.written, "plan: the step is written");
  Require(most_per_sequence >= 1, "plan: most_per_sequence is below 1");
  EndStep();
  const auto lacks = [](const RunningSequence* sequence) { return sequence->num_lacking() > 0; };
  const auto lacking = std::count_if(order_.begin(), order_.end(), lacks);
  int64_t spare = std::max<int64_t>(0, budget - lacking);
  step_.most_per_sequence = most_per_sequence;
  step_.logits_left = std::max<int64_t>(0, logits_budget - static_cast<int64_t>(order_.size()));
  for (RunningSequence* sequence : order_) {
    if (!lacks(sequence)) continue;
    const int64_t wanted =
        1 + std::min({sequence->num_lacking() - int64_t{1}, spare, most_per_sequence - 1});
    const int64_t num_tokens = sequence->Fitting(wanted, 1 + step_.logits_left);
    if (!Prepare(sequence, num_tokens)) {
      step_.Clear();
      return false;
    }
    const Row& row = step_.Add(sequence, static_cast<int32_t>(num_tokens));
    step_.logits_left -= std::max(0, row.num_logits() - 1);
    spare -= num_tokens - 1;
  }
  if (guessed_) PlanDrafts(spare);
  step_.planned = true;
  return true;
}

int64_t Batch::Schedule(int64_t id, int64_t most) {
  RunningSequence& sequence = Find(id);
  Require(step_.planned, "schedule: no step is planned");
  Require(!step_.written, "schedule: the step is written");
  Require(sequence.row == kNoRow, "schedule: the sequence has a row");
  const int64_t wanted = std::min({int64_t{sequence.num_lacking()}, most, step_.most_per_sequence});
  const int64_t num_tokens = sequence.Fitting(wanted, step_.logits_left);
  if (num_tokens < 1 || !Prepare(&sequence, num_tokens)) return 0;
  step_.logits_left -= step_.Add(&sequence, static_cast<int32_t>(num_tokens)).num_logits();
  return num_tokens;
}

bool Batch::Prepare(RunningSequence* sequence, int64_t num_tokens) {
  const int32_t start = sequence->num_computed;
  return tables_.Prepare(&sequence->table, sequence->num_tokens(), start,
                         start + static_cast<int32_t>(num_tokens));
}

const std::vector<Sample>& Batch::Samples() {
  step_.CollectSamples(&samples_);
  return samples_;
}

std::vector<Score> Batch::Scores(const PlannedStep& step) {
  std::vector<Score> scores;
  for (const Row& row : step.rows) {
    if (row.num_scored > 0) {
      scores.push_back({row.sequence->id, row.first_logits, row.start, row.num_scored});
    }
  }
  return scores;
}

void Batch::Write(std::byte* slot, size_t slot_bytes, uint64_t step_id) {
  PlannedStep& step = ahead_.in_flight() ? ahead_ : step_;
  Require(step.in_flight(), "write: no step with rows is planned");
  Require(!step.written, "write: the step is written");
  Copies copies = tables_.copies();
  const auto is_before = [this](const auto& copy) {
    return std::find(step_.copies.begin(), step_.copies.end(), copy) != step_.copies.end();
  };
  copies.erase(std::remove_if(copies.begin(), copies.end(), is_before), copies.end());
  Pairs stores, loads;
  Transfers* transfers = tables_.transfers();
  if (transfers != nullptr) {
    stores = transfers->stores();
    loads = transfers->loads();
  }
  writer_.Write(slot, slot_bytes, step_id, step, {copies, stores, loads});
  if (transfers != nullptr) transfers->Send(stores.size(), loads.size());
  step.copies = std::move(copies);
  step.stores = std::move(stores);
  step.loads = std::move(loads);
  step.written = true;
}

// ------------------------------------------------------------------ the end of a step

const Outcome& Batch::Apply(const std::vector<int32_t>& tokens,
                            const std::vector<int32_t>& complete) {
  Require(step_.written, "apply: the step is not written");
  Require(!ahead_.in_flight() || ahead_.written, "apply: the one ahead is not written");
  if (step_.ahead) CheckStands();
  step_.CollectSamples(&samples_);
  CheckDrawn(tokens, complete);
  CollectTaken(tokens, complete);
  if (tables_.transfers() != nullptr) {
    tables_.transfers()->Finish(step_.stores.size(), step_.loads.size());
  }
  tables_.FinishCopies(step_.copies);
  ForgetBroken(tokens);
  for (const Row& row : step_.rows) {
    Progress(row.sequence, step_.ahead ? row.num_progressing() : row.num_tokens);
  }
  for (const Rider& rider : step_.riders) {
    Progress(rider.sequence, step_.rows[rider.row].num_tokens);
  }
  const std::vector<Owned> closing = NextStep();
  ForgetGuesses();

  const size_t count = outcome_.samples.size();
  outcome_.request_ids.resize(count);
  outcome_.token_ids.resize(count);
  outcome_.finishes.resize(count);
  outcome_.finished.clear();
  outcome_.finished_tokens.clear();
  for (size_t i = 0; i < count; ++i) {
    const int32_t index = outcome_.samples[i], token = tokens[index];
    const Sample& sample = samples_[index];
    const bool wanted = sample.sequence->wanted();
    const bool completes = Contains(complete, index);
    outcome_.request_ids[i] = wanted ? sample.sequence->rules.request_id : -1;
    outcome_.token_ids[i] = token;
    outcome_.finishes[i] = wanted ? Take(sample, token, completes) : kFinishNone;
  }
  RemoveFinished();
  ReleaseClosing(closing);
  return outcome_;
}

void Batch::CheckDrawn(const std::vector<int32_t>& tokens,
                       const std::vector<int32_t>& complete) const {
  if (tokens.size() != samples_.size()) {
    throw BrokenInvariant("apply: " + std::to_string(tokens.size()) + " tokens for " +
                          std::to_string(samples_.size()) + " samples");
  }
  Require(Least(tokens) >= kNotFinite, "apply: a token id is below -1");
  const auto& drafts = step_.drafts;
  Require(std::find(drafts.begin(), drafts.end(), kUnknownDraft) == drafts.end(),
          "apply: a draft is not filled");
  int64_t before = -1;
  for (const int64_t sample : complete) {
    Require(sample > before && sample < static_cast<int64_t>(samples_.size()),
            "apply: `complete` are not samples in ascending order");
    before = sample;
  }
}

// What led to logits that are not finite may be as broken.
void Batch::ForgetBroken(const std::vector<int32_t>& tokens) {
  if (Least(tokens) >= 0) return;
  for (const int32_t index : outcome_.samples) {
    if (tokens[index] != kNotFinite) continue;
    RunningSequence* sequence = samples_[index].sequence;
    for (const int32_t block : sequence->table.blocks) tables_.cache().Forget(block);
    ForgetOnHost(*sequence);
    CeaseCaching(sequence);
  }
}

void Batch::ForgetOnHost(const RunningSequence& sequence) {
  if (tables_.transfers() == nullptr) return;
  const auto size = static_cast<size_t>(tables_.block_size());
  for (size_t i = 0; i + 1 < sequence.digests.size(); ++i) {
    tables_.transfers()->Forget(sequence.digests[i], sequence.digests[i + 1],
                                sequence.tokens.data() + i * size);
  }
}

void Batch::Progress(RunningSequence* sequence, int32_t num_tokens) {
  const int32_t size = tables_.block_size();
  const int32_t before = sequence->num_computed / size;
  const int32_t behind = sequence->num_computed - before * size + num_tokens;
  sequence->num_computed += num_tokens;
  if (!sequence->cached || behind < size) return;  // no block is full
  const int32_t after = before + behind / size;
  for (int32_t i = before; i < after; ++i) {
    tables_.cache().AddFull(sequence->table.blocks[i], sequence->digests[i + 1],
                            sequence->digests[i],
                            sequence->tokens.data() + static_cast<size_t>(i) * size);
  }
  if (!sequence->closed) DropPending(*sequence, before, after);
}

// The drawn token, which is computed already if it is the draft.
uint8_t Batch::Take(const Sample& sample, int32_t token, bool completes) {
  RunningSequence* sequence = sample.sequence;
  uint8_t finish = kFinishNotFinite;
  if (token != kNotFinite) {
    const bool computed = token == sample.draft;
    sequence->tokens.push_back(token);
    finish = completes ? kFinishStop : sequence->FinishAt(sequence->num_tokens(), token);
    const bool progresses = computed || finish == kFinishNone || sequence->row != kNoRow;
    if (progresses) ExtendDigests(sequence);
    if (computed) {
      Progress(sequence, 1);
    } else if (finish == kFinishNone) {  // no draft behind it is taken
      tables_.Trim(&sequence->table, sequence->num_tokens());
    }
  }
  if (finish != kFinishNone) EndSequence(sequence);
  return finish;
}

// Gives its blocks back, unless the step that was ahead has it; the caller removes it.
void Batch::EndSequence(RunningSequence* sequence) {
  DropPending(*sequence);
  sequence->closed = true;
  if (sequence->row == kNoRow) Release(*sequence);
  outcome_.finished.push_back(sequence->id);
  outcome_.finished_tokens.push_back(sequence->num_tokens());
}

// A token was added: with it, a block may have all its tokens.
void Batch::ExtendDigests(RunningSequence* sequence) {
  const int32_t size = tables_.block_size(), count = sequence->num_tokens();
  if (!sequence->cached || count % size != 0) return;
  const Digest parent = sequence->digests.back();
  sequence->digests.push_back(BlockDigest(parent, &sequence->tokens[count - size], size));
  const auto whole = static_cast<size_t>(count / size);
  AddPending(*sequence, whole - 1, whole);
}

void Batch::RemoveFinished() {
  if (outcome_.finished.empty()) return;
  const auto closed = [](const RunningSequence* sequence) { return sequence->closed; };
  order_.erase(std::remove_if(order_.begin(), order_.end(), closed), order_.end());
  for (const int64_t id : outcome_.finished) {
    const auto entry = by_id_.find(id);
    if (entry->second->row != kNoRow) step_.closing.push_back(std::move(entry->second));
    by_id_.erase(entry);
  }
}

void Batch::Abandon() {
  Require(step_.in_flight(), "abandon: no step is in flight");
  if (ahead_.in_flight()) {  // what it may have copied of this one is no text to be found
    for (const Row& row : step_.rows) CeaseCaching(row.sequence);
    for (const Rider& rider : step_.riders) CeaseCaching(rider.sequence);
  }
  EndStep();
  ForgetGuesses();
}

void Batch::EndStep() {
  if (step_.written && tables_.transfers() != nullptr) {
    tables_.transfers()->Abandon(step_.stores.size(), step_.loads.size());
  }
  DropUnknown();
  ReleaseClosing(NextStep());
}

// The step in flight is over. Returns those to be released with it.
std::vector<Batch::Owned> Batch::NextStep() {
  std::vector<Owned> closing;
  closing.swap(step_.closing);
  step_.Clear();
  if (ahead_.in_flight()) {
    std::swap(step_, ahead_);
    step_.Arrive();
  }
  return closing;
}

}  // namespace triptych
