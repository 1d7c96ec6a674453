// Twin of engine_core/planned_step.py: the rows of the next step, and who samples from them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "running.h"

namespace triptych {

constexpr int32_t kNoSample = -1;

struct Row {
  RunningSequence* sequence;
  int32_t start;
  int32_t num_tokens;
  int32_t num_scored;
  bool samples;
  int32_t first_token;   // of the step
  int32_t first_logits;  // those for scores, then the samples'
  // Guesses behind the sequence's own tokens, in PlannedStep::drafts.
  int32_t first_draft = 0;
  int32_t num_drafts = 0;
  // Its token is what that sample of the step before draws; kNoSample: its tokens are known.
  int32_t previous = kNoSample;

  // Own tokens by which the sequence is further when the step is over. Not those of a sequence that
  // ceased to run before the step began.
  int32_t num_progressing() const {
    if (sequence->num_computed != start) return 0;
    return std::min(num_tokens, sequence->num_tokens() - start);
  }
  int32_t own_end() const { return start + num_tokens; }
  int32_t end() const { return own_end() + num_drafts; }
  int32_t width() const { return num_tokens + num_drafts; }
  int32_t num_logits() const { return num_scored + (samples ? 1 + num_drafts : 0); }
};

// A sequence that was forked from a row's while the step was planned.
struct Rider {
  RunningSequence* sequence;
  int32_t row;
};

struct Sample {
  RunningSequence* sequence;
  int32_t logits_row;
  int32_t draft;  // behind it; kNoDraft: none
};

struct PlannedStep {
  std::vector<Row> rows;
  std::vector<Rider> riders;
  std::vector<int32_t> drafts;                            // of all rows, in order
  std::vector<std::unique_ptr<RunningSequence>> closing;  // to be released when it is over
  Copies copies;                                          // as written
  Pairs stores, loads;                                    // likewise
  bool planned = false;                                   // rows may be added
  bool written = false;
  bool ahead = false;  // it was planned while another was in flight
  int64_t most_per_sequence = 0;
  int64_t logits_left = 0;
  int32_t num_tokens = 0;
  int32_t num_logits = 0;

  bool in_flight() const { return !rows.empty(); }

  const Row& Add(RunningSequence* sequence, int32_t count) {
    const bool samples = count == sequence->num_lacking();
    rows.push_back({sequence, sequence->num_computed, count,
                    static_cast<int32_t>(sequence->NumScored(count)), samples, num_tokens,
                    num_logits});
    sequence->row = static_cast<int32_t>(rows.size()) - 1;
    num_tokens += count;
    num_logits += rows.back().num_logits();
    return rows.back();
  }

  // For a step ahead: behind `passed` tokens that the step in flight computes.
  void AddAhead(RunningSequence* sequence, int32_t passed, int32_t count, int32_t previous) {
    const bool samples = previous != kNoSample || count == sequence->num_lacking() - passed;
    rows.push_back({sequence, sequence->num_computed + passed, count,
                    static_cast<int32_t>(sequence->NumScored(count, passed)), samples, num_tokens,
                    num_logits});
    rows.back().previous = previous;
    sequence->ahead_row = static_cast<int32_t>(rows.size()) - 1;
    num_tokens += count;
    num_logits += rows.back().num_logits();
  }

  // The step ahead becomes the one in flight.
  void Arrive() {
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].sequence->row = static_cast<int32_t>(i);
      rows[i].sequence->ahead_row = kNoRow;
    }
  }

  // Guesses behind a row that samples. When all rows have theirs, Renumber.
  void AddDrafts(Row* row, const int32_t* guesses, int32_t count) {
    row->first_draft = static_cast<int32_t>(drafts.size());
    row->num_drafts = count;
    drafts.insert(drafts.end(), guesses, guesses + count);
  }

  void Renumber() {
    num_tokens = num_logits = 0;
    for (Row& row : rows) {
      row.first_token = num_tokens;
      row.first_logits = num_logits;
      num_tokens += row.width();
      num_logits += row.num_logits();
    }
  }

  void Ride(RunningSequence* sequence, int32_t row) {
    riders.push_back({sequence, row});
    sequence->row = row;
  }

  void CollectSamples(std::vector<Sample>* samples) const {
    samples->clear();
    for (const Row& row : rows) {
      if (!row.samples) continue;
      int32_t logits_row = row.first_logits + row.num_scored;
      const int32_t* draft = drafts.data() + row.first_draft;
      for (int32_t i = 0; i < row.num_drafts; ++i) {
        samples->push_back({row.sequence, logits_row++, *draft++});
      }
      samples->push_back({row.sequence, logits_row, kNoDraft});
    }
    for (const Rider& rider : riders) {
      const Row& row = rows[rider.row];  // without drafts
      if (row.samples) {
        samples->push_back({rider.sequence, row.first_logits + row.num_scored, kNoDraft});
      }
    }
  }

  // Nothing is planned any more; riders become ordinary sequences. `closing` is the caller's.
  void Clear() {
    for (const Row& row : rows) row.sequence->row = kNoRow;
    for (const Rider& rider : riders) rider.sequence->row = kNoRow;
    rows.clear();
    riders.clear();
    drafts.clear();
    copies.clear();
    stores.clear();
    loads.clear();
    planned = written = ahead = false;
    num_tokens = num_logits = 0;
  }
};

}  // namespace triptych
