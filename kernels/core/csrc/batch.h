// Twin of engine_core/python_batch.py; the contract is in engine_core/batch.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "block_tables.h"
#include "digest_map.h"
#include "planned_step.h"
#include "running.h"
#include "slot_writer.h"

namespace triptych {

struct Match {
  int64_t computed;
  int64_t pending;
};

struct Score {
  int64_t sequence_id;
  int32_t logits_row;
  int32_t position;
  int32_t num_positions;
};

// Of a step ahead; all 0 where there is none.
struct Extent {
  size_t num_rows;
  int32_t num_tokens;
  int32_t num_logits;
};

// Columns over the samples of a step that were taken or are nobody's; safe until the next call.
struct Outcome {
  std::vector<int32_t> samples;
  std::vector<int64_t> request_ids;
  std::vector<int32_t> token_ids;
  std::vector<uint8_t> finishes;
  std::vector<int64_t> finished;
  std::vector<int64_t> finished_tokens;
};

class Batch {
 public:
  Batch(int32_t num_blocks, int32_t block_size, const SlotLayout& layout, bool prefix_caching,
        int32_t num_host_blocks);

  // Sequences (batch.cpp)
  std::vector<Digest> PrefixDigests(const std::vector<int32_t>& tokens,
                                    std::string_view salt) const;
  triptych::Match Match(const std::vector<int32_t>& tokens, std::string_view digests) const;
  int64_t Open(int64_t id, std::vector<int32_t> tokens, std::string_view digests,
               SequenceRules rules, int64_t place, int64_t spare_blocks);
  void Fork(int64_t id, int64_t new_id, SequenceRules rules, int64_t place);
  void Append(int64_t id, int64_t token);
  void Close(int64_t id);
  void ForgetCache();

  // Guesses (batch_drafts.cpp)
  void Draft(int64_t id, std::vector<int32_t> tokens);
  void FillDrafts(const std::vector<int32_t>& tokens);

  // A step (batch_step.cpp)
  bool Plan(int64_t budget, int64_t most_per_sequence, int64_t logits_budget);
  int64_t Schedule(int64_t id, int64_t most);
  const std::vector<Sample>& Samples();  // safe until the next call
  static std::vector<Score> Scores(const PlannedStep& step);
  void Write(std::byte* slot, size_t slot_bytes, uint64_t step_id);
  const Outcome& Apply(const std::vector<int32_t>& tokens, const std::vector<int32_t>& complete);
  void Abandon();

  // The step ahead (batch_ahead.cpp)
  Extent PlanAhead(const std::vector<int64_t>& host_drawn, int64_t budget,
                   int64_t most_per_sequence, int64_t logits_budget);  // host_drawn: ascending
  const std::vector<Sample>& SamplesAhead();                           // safe until the next call

  // Facts (batch.cpp)
  const PlannedStep& step() const { return step_; }
  const PlannedStep& ahead() const { return ahead_; }
  const BlockTables& tables() const { return tables_; }
  const std::vector<RunningSequence*>& order() const { return order_; }
  const RunningSequence& Get(int64_t id) const;
  int64_t NumUnusedSlots() const;
  int64_t prefix_queries_total() const { return prefix_queries_total_; }
  int64_t prefix_hits_total() const { return prefix_hits_total_; }
  int64_t host_hits_total() const { return host_hits_total_; }
  void Check() const;

 private:
  using Owned = std::unique_ptr<RunningSequence>;

  RunningSequence& Find(int64_t id);
  void CheckNew(int64_t id, int64_t place) const;
  void Enter(Owned sequence, int64_t place);
  void Release(const RunningSequence& sequence);
  std::vector<Owned> NextStep();
  void ReleaseClosing(const std::vector<Owned>& closing);
  void EndStep();

  std::vector<Digest> Split(std::string_view digests, size_t num_tokens) const;
  Hit Lookup(const std::vector<int32_t>& tokens, const std::vector<Digest>& chain) const;

  // The whole blocks [from, to) of a cached sequence: counted in, or out of, what is pending.
  void AddPending(const RunningSequence& sequence, size_t from, size_t to);
  void DropPending(const RunningSequence& sequence, size_t from, size_t to);
  void DropPending(const RunningSequence& sequence);
  void CeaseCaching(RunningSequence* sequence);

  bool Prepare(RunningSequence* sequence, int64_t num_tokens);
  void PlanDrafts(int64_t tokens_left);
  void DropUnknown();
  void ForgetGuesses();

  // Where a sequence stands when the step in flight is over, and what it gets of the one ahead.
  struct Outlook {
    RunningSequence* sequence;
    int32_t passed;
    int32_t num_lacking;
    int32_t previous;
    int32_t num_tokens = 1;

    int32_t start() const { return sequence->num_computed + passed; }
  };
  void CollectOutlooks(const std::vector<int64_t>& host_drawn);
  void ShareOut(int64_t budget, int64_t most_per_sequence, int64_t logits_budget);
  int32_t NumWanted(const Outlook& outlook) const;

  void CheckDrawn(const std::vector<int32_t>& tokens, const std::vector<int32_t>& complete) const;
  void CollectTaken(const std::vector<int32_t>& tokens, const std::vector<int32_t>& complete);
  void CheckStands() const;
  void ForgetOnHost(const RunningSequence& sequence);
  void ForgetBroken(const std::vector<int32_t>& tokens);
  void Progress(RunningSequence* sequence, int32_t num_tokens);
  void ExtendDigests(RunningSequence* sequence);
  uint8_t Take(const Sample& sample, int32_t token, bool completes);
  void EndSequence(RunningSequence* sequence);
  void RemoveFinished();

  BlockTables tables_;
  SlotWriter writer_;
  bool prefix_caching_;
  std::unordered_map<int64_t, Owned> by_id_;
  std::vector<RunningSequence*> order_;
  DigestMap pending_;  // how many open cached sequences are to compute the block
  PlannedStep step_;
  PlannedStep ahead_;     // in flight behind it
  bool guessed_ = false;  // whether a sequence may have guesses
  // Members to keep their memory from step to step.
  std::vector<Sample> samples_;
  std::vector<Outlook> outlooks_;
  Outcome outcome_;
  int64_t prefix_queries_total_ = 0;
  int64_t prefix_hits_total_ = 0;
  int64_t host_hits_total_ = 0;
};

}  // namespace triptych
