// What a plan does once: checks, and places for the numbers of its steps.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan.h"

namespace triptych {
namespace {

void check(const char* name, const PackedMatrix& matrix, int rows, int columns) {
  if (matrix.rows != rows || matrix.columns != columns)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(matrix.rows) + " x " +
                                std::to_string(matrix.columns) + ", the plan needs " +
                                std::to_string(rows) + " x " + std::to_string(columns));
}

}  // namespace

Plan::Plan(PlanShape shape, PlanWeights weights, int threads, std::vector<int> affinity)
    : shape_(std::move(shape)),
      weights_(std::move(weights)),
      kv_(shape_.kv),
      pool_(threads, std::move(affinity)),
      items_({shape_.kv.kv_heads, threads, shape_.window, shape_.max_length}),
      hidden_(shape_.hidden),
      queries_(shape_.heads * shape_.kv.head_dim),
      keys_(shape_.kv.kv_heads * shape_.kv.head_dim),
      qkv_(queries_ + 2 * keys_),
      heads_per_key_(shape_.heads / shape_.kv.kv_heads),
      next_item_(static_cast<size_t>(shape_.kv.layers)),
      cycles_(kPhases) {
  if (shape_.heads % shape_.kv.kv_heads != 0 || shape_.kv.head_dim % 2 != 0 ||
      static_cast<int>(shape_.frequencies.size()) * 2 != shape_.kv.head_dim)
    throw std::invalid_argument("heads, kv_heads, head_dim and frequencies contradict one another");
  if (static_cast<int>(weights_.layers.size()) != shape_.kv.layers)
    throw std::invalid_argument("the number of layers differs from the cache's");
  const ActivationLimits& limits = shape_.limits;
  for (const int limit : {limits.qkv, limits.output, limits.gate_up, limits.down, limits.head})
    if (limit < 1 || limit > kActivationLimit16)
      throw std::invalid_argument("activation limit " + std::to_string(limit) +
                                  " is not within 1 and " + std::to_string(kActivationLimit16));
  check("embedding", weights_.embedding, shape_.vocabulary_size, hidden_);
  check("head", weights_.head, shape_.vocabulary_size, hidden_);
  for (const LayerWeights& each : weights_.layers) {
    check("q", each.q, queries_, hidden_);
    check("k", each.k, keys_, hidden_);
    check("v", each.v, keys_, hidden_);
    check("output", each.output, hidden_, queries_);
    check("gate", each.gate, shape_.intermediate, hidden_);
    check("up", each.up, shape_.intermediate, hidden_);
    check("down", each.down, hidden_, shape_.intermediate);
    for (const PackedMatrix* matrix : {&each.q, &each.k, &each.v, &each.gate, &each.up})
      quantises_hidden_ |= takes_codes(matrix->format);
  }
  quantises_hidden_ |= takes_codes(weights_.head.format);
}

void Plan::reserve(int tokens) {
  if (tokens <= reserved_) return;
  reserved_ = 0;  // until all is in place
  buffers_.clear();
  const auto floats = [this](size_t count) {
    buffers_.emplace_back(count * sizeof(float));
    return buffers_.back().floats();
  };
  const auto inputs = [this](const float* values, int rows, int columns, int limit) {
    buffers_.emplace_back(quantized_bytes(rows, columns));
    QuantizedRows made = place_quantized_rows(buffers_.back().data(), columns, limit);
    made.floats = values;
    made.float_pitch = static_cast<size_t>(columns);
    return made;
  };
  const auto matrix = [&floats](int rows, int columns) {
    return floats(static_cast<size_t>(rows) * static_cast<size_t>(columns));
  };
  const int head_dim = shape_.kv.head_dim;
  x_ = matrix(tokens, hidden_);
  projected_ = matrix(tokens, qkv_);
  mixed_ = matrix(tokens, queries_);
  gate_ = matrix(tokens, shape_.intermediate);
  up_ = matrix(tokens, shape_.intermediate);
  cosines_ = matrix(tokens, head_dim / 2);
  sines_ = matrix(tokens, head_dim / 2);
  partials_ = floats(items_.most_partials() * static_cast<size_t>(heads_per_key_) *
                     partial_floats(head_dim));
  const auto normed = [&](int rows) {
    float* values = matrix(rows, hidden_);
    return Inputs{values, inputs(values, rows, hidden_, kActivationLimit16)};
  };
  normed_ = normed(tokens);
  mixed_inputs_ = inputs(mixed_, tokens, queries_, shape_.limits.output);
  gated_ = inputs(gate_, tokens, shape_.intermediate, shape_.limits.down);
  few_normed_.clear();
  few_mixed_.clear();
  scratch_.clear();
  reordered_.clear();
  for (int thread = 0; thread < pool_.size(); ++thread) {
    few_normed_.push_back(normed(kFewRows));
    few_mixed_.push_back(inputs(mixed_, kFewRows, queries_, shape_.limits.output));
    scratch_.push_back(floats(attention_scratch(head_dim, heads_per_key_)));
    reordered_.push_back(matrix(1, std::max(hidden_, queries_)));
  }
  items_.reserve(tokens);
  reserved_ = tokens;
}

}  // namespace triptych
