// Twin of engine_core/planned_step.py: the rows of the next step, and who samples from them.
#pragma once

#include <cstdint>
#include <vector>

#include "running.h"

namespace triptych {

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
  std::vector<int32_t> drafts;  // of all rows, in order
  bool planned = false;         // rows may be added
  bool written = false;
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

  // Nothing is planned any more; riders become ordinary sequences.
  void Clear() {
    for (const Row& row : rows) row.sequence->row = kNoRow;
    for (const Rider& rider : riders) rider.sequence->row = kNoRow;
    rows.clear();
    riders.clear();
    drafts.clear();
    planned = written = false;
    num_tokens = num_logits = 0;
  }
};

}  // namespace triptych
