// The step ahead: planned while another is in flight. Twin of engine_core/planning_ahead.py.
#include <algorithm>

#include "batch.h"
#include "errors.h"

namespace triptych {

Extent Batch::PlanAhead(const std::vector<int64_t>& host_drawn, int64_t budget,
                        int64_t most_per_sequence, int64_t logits_budget) {
  Require(step_.written, "plan_ahead: no written step is in flight");
  Require(!ahead_.in_flight(), "plan_ahead: two steps are in flight");
  Require(most_per_sequence >= 1, "plan_ahead: most_per_sequence is below 1");
  if (step_.ahead) CheckStands();
  CollectOutlooks(host_drawn);
  ShareOut(budget, most_per_sequence, logits_budget);
  int64_t wanted = 0;
  for (const Outlook& outlook : outlooks_) wanted += NumWanted(outlook);
  if (outlooks_.empty() || wanted > tables_.pool().num_free()) return {0, 0, 0};
  ahead_.ahead = true;
  for (const Outlook& outlook : outlooks_) {
    const int32_t start = outlook.start();
    tables_.Prepare(&outlook.sequence->table, start + outlook.num_lacking, start,
                    start + outlook.num_tokens);
    ahead_.AddAhead(outlook.sequence, outlook.passed, outlook.num_tokens, outlook.previous);
  }
  return {ahead_.rows.size(), ahead_.num_tokens, ahead_.num_logits};
}

void Batch::CollectOutlooks(const std::vector<int64_t>& host_drawn) {
  outlooks_.clear();
  // Nobody has a row ahead yet: for a while, that is where each sequence's first sample is noted.
  step_.CollectSamples(&samples_);
  for (size_t i = 0; i < samples_.size(); ++i) {
    int32_t& first = samples_[i].sequence->ahead_row;
    if (first == kNoRow) first = static_cast<int32_t>(i);
  }
  for (RunningSequence* sequence : order_) {
    if (sequence->rules.held) continue;
    const Row* row = sequence->row == kNoRow ? nullptr : &step_.rows[sequence->row];
    const int32_t passed = row == nullptr ? 0 : row->num_tokens, previous = sequence->ahead_row;
    if (previous == kNoRow) {
      if (passed > 0 || !tables_.Awaits(sequence->table)) {
        outlooks_.push_back({sequence, passed, sequence->num_lacking() - passed, kNoSample});
      }
    } else if (sequence->num_tokens() + 1 < sequence->most_tokens() && row->num_drafts == 0 &&
               !Contains(host_drawn, sequence->id)) {
      outlooks_.push_back({sequence, passed, 1, previous});
    }
  }
  for (const Sample& sample : samples_) sample.sequence->ahead_row = kNoRow;
}

// As in Plan.
void Batch::ShareOut(int64_t budget, int64_t most_per_sequence, int64_t logits_budget) {
  int64_t spare = std::max<int64_t>(0, budget - static_cast<int64_t>(outlooks_.size()));
  int64_t logits_left = std::max<int64_t>(0, logits_budget - static_cast<int64_t>(order_.size()));
  for (Outlook& outlook : outlooks_) {
    if (outlook.previous != kNoSample) continue;
    const RunningSequence& sequence = *outlook.sequence;
    const int64_t wanted =
        1 + std::min({outlook.num_lacking - int64_t{1}, spare, most_per_sequence - 1});
    const int64_t count = sequence.Fitting(wanted, 1 + logits_left, outlook.passed);
    const int64_t num_logits =
        sequence.NumScored(count, outlook.passed) + (count == outlook.num_lacking);
    logits_left -= std::max<int64_t>(0, num_logits - 1);
    spare -= count - 1;
    outlook.num_tokens = static_cast<int32_t>(count);
  }
}

int32_t Batch::NumWanted(const Outlook& outlook) const {
  const int32_t start = outlook.start();
  return tables_.NumWanted(outlook.sequence->table, start + outlook.num_lacking, start,
                           start + outlook.num_tokens);
}

const std::vector<Sample>& Batch::SamplesAhead() {
  ahead_.CollectSamples(&samples_);
  return samples_;
}

void Batch::CheckStands() const {
  for (const Row& row : step_.rows) {
    Require(row.sequence->closed || row.sequence->num_computed == row.start,
            "a row stands on an abandoned step, and its sequence runs");
  }
}

}  // namespace triptych
