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
  int32_t first_logits;  // those for scores, then the sample's

  int32_t end() const { return start + num_tokens; }
  int32_t num_logits() const { return num_scored + samples; }
};

// A sequence that was forked from a row's while the step was planned.
struct Rider {
  RunningSequence* sequence;
  int32_t row;
};

struct Sample {
  RunningSequence* sequence;
  int32_t logits_row;
};

struct PlannedStep {
  std::vector<Row> rows;
  std::vector<Rider> riders;
  bool planned = false;  // rows may be added
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

  void Ride(RunningSequence* sequence, int32_t row) {
    riders.push_back({sequence, row});
    sequence->row = row;
  }

  void CollectSamples(std::vector<Sample>* samples) const {
    samples->clear();
    const auto sample = [samples](const Row& row, RunningSequence* owner) {
      if (row.samples) samples->push_back({owner, row.first_logits + row.num_scored});
    };
    for (const Row& row : rows) sample(row, row.sequence);
    for (const Rider& rider : riders) sample(rows[rider.row], rider.sequence);
  }

  // Nothing is planned any more; riders become ordinary sequences.
  void Clear() {
    for (const Row& row : rows) row.sequence->row = kNoRow;
    for (const Rider& rider : riders) rider.sequence->row = kNoRow;
    rows.clear();
    riders.clear();
    planned = written = false;
    num_tokens = num_logits = 0;
  }
};

}  // namespace triptych
