#include "attention_items.h"

#include <algorithm>

namespace triptych {
namespace {

constexpr int kFixedCost = 32;  // of an item, in tokens read

}  // namespace

int AttentionItems::low(int position) const { return std::max(0, position - limits_.window + 1); }

size_t AttentionItems::most_partials() const {
  const size_t partitions = static_cast<size_t>(limits_.max_length) / kPartition + 2;
  return 2 * static_cast<size_t>(limits_.threads) * partitions;
}

void AttentionItems::reserve(int tokens) {
  items_.reserve(static_cast<size_t>(tokens) * static_cast<size_t>(limits_.kv_heads) +
                 most_partials());
  merges_.reserve(2 * static_cast<size_t>(limits_.threads));
}

void AttentionItems::build(const StepView& step) {
  items_.clear();
  merges_.clear();
  partials_ = 0;
  for (int row = 0; row < step.rows; ++row) add_tiles(step, row);
  int64_t total = 0;
  for (const AttentionItem& item : items_) total += item.cost;
  // Fewer than 2 * threads items can cost more than this share of the total.
  const int64_t dear = total / (2 * limits_.threads);
  const size_t whole = items_.size();
  for (size_t i = 0; limits_.threads > 1 && i < whole; ++i) {
    const AttentionItem item = items_[i];
    const int position = item.first_position;
    if (item.cost > dear && item.tokens == 1 && low(position) / kPartition < position / kPartition)
      split(item);
    else
      items_[i - merges_.size()] = item;
  }
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(whole - merges_.size()),
               items_.begin() + static_cast<std::ptrdiff_t>(whole));
  std::sort(items_.begin(), items_.end(),
            [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

void AttentionItems::add_tiles(const StepView& step, int row) {
  const int length = step.kv_lengths[row];
  int token = step.row_starts[row];
  for (int position = length - (step.row_starts[row + 1] - token); position < length;) {
    const int end = std::min(length, position / kTileTokens * kTileTokens + kTileTokens);
    const int tokens = end - position;
    const int64_t cost = static_cast<int64_t>(tokens) * (end - low(position)) + kFixedCost;
    for (int head = 0; head < limits_.kv_heads; ++head)
      items_.push_back({cost, row, token, tokens, head, position, -1, 0});
    position = end;
    token += tokens;
  }
}

// Appends the parts of an item; their partials lie one behind the other.
void AttentionItems::split(const AttentionItem& item) {
  const int position = item.first_position;
  const int begin = low(position) / kPartition, end = position / kPartition + 1;
  merges_.push_back({item.token, item.kv_head, partials_, end - begin});
  for (int partition = begin; partition < end; ++partition) {
    AttentionItem part = item;
    part.partition = partition;
    part.partial = partials_++;
    part.cost = std::min(position + 1, (partition + 1) * kPartition) -
                std::max(low(position), partition * kPartition) + kFixedCost;
    items_.push_back(part);
  }
}

AttentionWork work_of(const StepView& step, const AttentionPlaces& places,
                      const AttentionItem& item) {
  const size_t token = static_cast<size_t>(item.token);
  const size_t first = static_cast<size_t>(item.kv_head * places.heads_per_key * places.head_dim);
  AttentionWork work;
  work.q = places.q + token * places.q_pitch + first;
  work.q_pitch = places.q_pitch;
  work.out = places.out + token * places.out_pitch + first;
  work.out_pitch = places.out_pitch;
  work.blocks =
      step.block_tables + static_cast<size_t>(item.row) * static_cast<size_t>(step.table_width);
  work.tokens = item.tokens;
  work.heads = places.heads_per_key;
  work.kv_head = item.kv_head;
  work.first_position = item.first_position;
  work.window = places.window;
  work.soft_cap = places.soft_cap;
  work.partition = item.partition;
  work.partials = places.partials + static_cast<size_t>(item.partial * places.heads_per_key) *
                                        partial_floats(places.head_dim);
  return work;
}

void merge_head(const AttentionKernels& kernels, const AttentionPlaces& places,
                const AttentionMerge& merge, int head, float* scratch) {
  const size_t floats = partial_floats(places.head_dim);
  const size_t stride = static_cast<size_t>(places.heads_per_key) * floats;
  const size_t place = static_cast<size_t>(merge.kv_head * places.heads_per_key + head);
  kernels.merge(places.partials + static_cast<size_t>(merge.partial) * stride +
                    static_cast<size_t>(head) * floats,
                merge.count, stride, places.head_dim, scratch,
                places.out + static_cast<size_t>(merge.token) * places.out_pitch +
                    place * static_cast<size_t>(places.head_dim));
}

}  // namespace triptych
