// A step's attention as a list of works that threads take one after the other, dearest first.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace triptych {

// What a step computes. Arrays as engine_core's step layout has them: `tokens` of them, `rows`
// rows.
struct StepView {
  const int32_t *token_ids, *positions, *slots;  // [tokens]
  const int32_t *row_starts, *kv_lengths;        // [rows + 1], [rows]
  const int32_t* block_tables;                   // [rows][table_width]
  const int32_t* logits_tokens;                  // [logits]
  const int32_t *copy_sources, *copy_targets;    // [copies]
  int tokens, rows, table_width, logits, copies;
};

struct AttentionItem {
  int64_t cost;
  int row, token, tokens, kv_head, first_position;
  int partition;  // -1: all of them
  int partial;    // its number among the partials of the step
};

// Partials to join: `count` from number `partial` on belong to the heads of one kv head of a token.
struct AttentionMerge {
  int token, kv_head, partial, count;
};

// Where a step's queries stand and its outputs go, [tokens][pitch], heads side by side.
struct AttentionPlaces {
  const float* q;
  size_t q_pitch;
  float* out;
  size_t out_pitch;
  float* partials;  // AttentionItems::most_partials() of heads_per_key * partial_floats()
  int heads_per_key, head_dim, window;
  float soft_cap;
};

AttentionWork work_of(const StepView& step, const AttentionPlaces& places,
                      const AttentionItem& item);

// One query head of a merge, `head` < places.heads_per_key.
void merge_head(const AttentionKernels& kernels, const AttentionPlaces& places,
                const AttentionMerge& merge, int head, float* scratch);

struct AttentionLimits {
  int kv_heads, threads, window, max_length;
};

class AttentionItems {
 public:
  explicit AttentionItems(const AttentionLimits& limits) : limits_(limits) {}

  // Makes room for any step of at most so many tokens.
  void reserve(int tokens);

  // Allocates nothing when room was made.
  void build(const StepView& step);

  // A sequence that decodes is split into partitions when it would keep one thread busy too long;
  // so few are that dear that the partials of a step have this bound.
  size_t most_partials() const;

  const std::vector<AttentionItem>& items() const { return items_; }
  const std::vector<AttentionMerge>& merges() const { return merges_; }

 private:
  void add_tiles(const StepView& step, int row);
  void split(const AttentionItem& item);
  int low(int position) const;

  AttentionLimits limits_;
  int partials_ = 0;
  std::vector<AttentionItem> items_;
  std::vector<AttentionMerge> merges_;
};

}  // namespace triptych
