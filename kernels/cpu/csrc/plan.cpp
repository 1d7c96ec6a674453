#include "plan.h"

#include <algorithm>
#include <cmath>

#if defined(TRIPTYCH_PROFILE) && defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace triptych {
namespace {

static_assert(kGatePanels * kPanelRows == kBlockColumns, "a gate's share fills blocks");

constexpr int kFewTokens = 64;  // the cache lines that they store to fit the second-level cache
constexpr int kRowsAtOnce =
    128;  // of the gate and up products, before their results leave the cache

void reorder(const float* from, const int32_t* order, size_t count, float* to) {
  for (size_t i = 0; i < count; ++i) to[i] = from[order[i]];
}

}  // namespace

void Plan::step(const StepView& step, float* logits, size_t pitch) {
  step_ = step;
  logits_ = logits;
  logits_pitch_ = pitch;
  kernels_ = &active_kernels();
  items_.build(step);
  for (int i = 0; i < step.copies; ++i) kv_.copy(step.copy_sources[i], step.copy_targets[i]);
  for (std::atomic<uint32_t>& next : next_item_) next.store(0, std::memory_order_relaxed);
  pool_.run([this](int thread) { work(thread); });
}

void Plan::work(int thread) {
  mark(thread, kPhases);
  embed(thread);
  pool_.barrier();
  mark(thread, kEmbed);
  for (int index = 0; index < shape_.kv.layers; ++index) layer(thread, index);
  if (step_.logits > 0) head(thread);
  mark(thread, kHead);
}

void Plan::embed(int thread) {
  const Span tokens = share(step_.tokens, thread);
  const size_t half = static_cast<size_t>(shape_.kv.head_dim) / 2;
  for (int token = tokens.begin; token < tokens.end; ++token) {
    const size_t row = static_cast<size_t>(token);
    unpack_row(weights_.embedding, step_.token_ids[token], x_ + row * static_cast<size_t>(hidden_));
    // The angle is rounded to float32, as transformers does, its functions are not.
    const float position = static_cast<float>(step_.positions[token]);
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position * shape_.frequencies[i]);
      cosines_[row * half + i] = static_cast<float>(std::cos(angle));
      sines_[row * half + i] = static_cast<float>(std::sin(angle));
    }
  }
}

void Plan::layer(int thread, int index) {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(index)];
  const KvLayer kv = kv_.layer(index);
  project_qkv(thread, weights, kv);
  pool_.barrier();
  mark(thread, kQkv);
  rotate_and_store(thread, weights, kv);
  pool_.barrier();
  mark(thread, kRotate);
  attend(thread, index, kv);
  pool_.barrier();
  if (!items_.merges().empty()) {
    merge(thread);
    pool_.barrier();
  }
  mark(thread, kAttention);
  project_output(thread, weights);
  pool_.barrier();
  mark(thread, kOutput);
  gate_up(thread, weights);
  pool_.barrier();
  mark(thread, kGateUp);
  down(weights, thread);
  pool_.barrier();
  mark(thread, kDown);
}

void Plan::project_qkv(int thread, const LayerWeights& weights, const KvLayer& kv) {
  const QuantizedRows inputs = normalise(thread, weights.attention_norm, nullptr, step_.tokens,
                                         weights.qkv_order, shape_.limits.qkv);
  if (step_.tokens <= kFewTokens) fetch_slots(thread, kv);
  const PackedMatrix* matrices[] = {&weights.q, &weights.k, &weights.v};
  float* const outputs[] = {projected_, projected_ + queries_, projected_ + queries_ + keys_};
  int total = 0;
  for (const PackedMatrix* matrix : matrices) total += panels_of(matrix->rows);
  // One run of panels over the three matrices, cut once for each thread.
  const Span mine = share(total, thread);
  int first = 0;
  for (int i = 0; i < 3; ++i) {
    const int panels = panels_of(matrices[i]->rows);
    multiply(*matrices[i], inputs, {0, step_.tokens}, part_of_run(mine, first, panels), outputs[i],
             static_cast<size_t>(qkv_), false);
    first += panels;
  }
}

// The keys that this thread will store go to many lines of memory: asked for now, they are there by
// then. (A store that misses waits for its line, one after the other.)
void Plan::fetch_slots(int thread, const KvLayer& kv) const {
  const int heads = shape_.heads + shape_.kv.kv_heads;
  const Span mine = share(step_.tokens * heads, thread);
  const size_t size = triptych::kv_bytes(kv.type),
               stride = size * static_cast<size_t>(kv.block_size);
  for (int i = mine.begin; i < mine.end; ++i) {
    const int key = i % heads - shape_.heads, slot = step_.slots[i / heads];
    if (key < 0) continue;
    const uint8_t* at = kv.data + static_cast<size_t>(slot / kv.block_size) * kv.block_stride +
                        static_cast<size_t>(key) * kv.head_stride +
                        static_cast<size_t>(slot % kv.block_size) * size;
    for (int d = 0; d < kv.head_dim; ++d)
      __builtin_prefetch(at + static_cast<size_t>(d) * stride, 1);
    __builtin_prefetch(at - static_cast<size_t>(slot % kv.block_size) * size + kv.values_offset, 1);
  }
}

void Plan::rotate_and_store(int thread, const LayerWeights& weights, const KvLayer& kv) {
  const int heads = shape_.heads + shape_.kv.kv_heads;
  const Span mine = share(step_.tokens * heads, thread);
  for (int i = mine.begin; i < mine.end; ++i) rotate_head(weights, kv, i / heads, i % heads);
}

// A query head, or behind them a key head, which is stored with its value.
void Plan::rotate_head(const LayerWeights& weights, const KvLayer& kv, int token, int head) {
  const size_t size = static_cast<size_t>(kv.head_dim), half = size / 2;
  float* const heads = projected_ + static_cast<size_t>(token) * static_cast<size_t>(qkv_);
  float* const at = heads + static_cast<size_t>(head) * size;  // keys follow queries
  const float* cosines = cosines_ + static_cast<size_t>(token) * half;
  const float* sines = sines_ + static_cast<size_t>(token) * half;
  const ElementwiseKernels& elementwise = *kernels_->elementwise;
  const int key = head - shape_.heads;
  if (key < 0) {
    if (weights.q_bias)
      elementwise.add(at, weights.q_bias + static_cast<size_t>(head) * size, size);
    elementwise.rotate(at, cosines, sines, half, 1.0f / std::sqrt(static_cast<float>(kv.head_dim)));
    return;
  }
  float* const value = at + keys_;
  const size_t offset = static_cast<size_t>(key) * size;
  if (weights.k_bias) elementwise.add(at, weights.k_bias + offset, size);
  if (weights.v_bias) elementwise.add(value, weights.v_bias + offset, size);
  elementwise.rotate(at, cosines, sines, half, 1.0f);
  const int slot = step_.slots[token];
  kernels_->attention->store(kv, slot / kv.block_size, slot % kv.block_size, key, at, value);
}

// Threads take the items one by one. Each knows its next before it starts on one, so that memory
// can fetch what that begins with.
void Plan::attend(int thread, int index, const KvLayer& kv) {
  const AttentionPlaces places = attention_places();
  const std::vector<AttentionItem>& items = items_.items();
  std::atomic<uint32_t>& counter = next_item_[static_cast<size_t>(index)];
  AttentionWork work{}, following{};
  const auto take = [&](AttentionWork& to) {
    const uint32_t i = counter.fetch_add(1, std::memory_order_relaxed);
    if (i >= items.size()) return false;
    to = work_of(step_, places, items[i]);
    return true;
  };
  for (bool some = take(work); some; work = following) {
    some = take(following);
    kernels_->attention->attend(kv, work, some ? &following : nullptr,
                                scratch_[static_cast<size_t>(thread)]);
  }
}

void Plan::merge(int thread) {
  const AttentionPlaces places = attention_places();
  const std::vector<AttentionMerge>& merges = items_.merges();
  const Span mine = share(static_cast<int>(merges.size()) * heads_per_key_, thread);
  for (int i = mine.begin; i < mine.end; ++i)
    merge_head(*kernels_->attention, places, merges[static_cast<size_t>(i / heads_per_key_)],
               i % heads_per_key_, scratch_[static_cast<size_t>(thread)]);
}

AttentionPlaces Plan::attention_places() const {
  return {projected_,
          static_cast<size_t>(qkv_),
          mixed_,
          static_cast<size_t>(queries_),
          partials_,
          heads_per_key_,
          shape_.kv.head_dim,
          shape_.window,
          shape_.attention_soft_cap};
}

void Plan::project_output(int thread, const LayerWeights& weights) {
  const QuantizedRows inputs = quantise_mixed(thread, weights.output, weights.output_order);
  multiply(weights.output, inputs, {0, step_.tokens}, share(panels_of(hidden_), thread), x_,
           static_cast<size_t>(hidden_), true);
}

// A thread takes the same outputs of both products, gates them and quantises them: nobody else
// needs them before the next barrier.
void Plan::gate_up(int thread, const LayerWeights& weights) {
  const QuantizedRows inputs = normalise(thread, weights.mlp_norm, nullptr, step_.tokens,
                                         weights.mlp_order, shape_.limits.gate_up);
  const size_t pitch = static_cast<size_t>(shape_.intermediate);
  const Span panels = share(panels_of(shape_.intermediate), thread, kGatePanels);
  const int begin = panels.begin * kPanelRows;
  const int end = std::min(panels.end * kPanelRows, shape_.intermediate);
  if (begin >= end) return;
  const size_t first = static_cast<size_t>(begin), size = static_cast<size_t>(end - begin);
  for (int row = 0; row < step_.tokens; row += kRowsAtOnce) {
    const int stop = std::min(step_.tokens, row + kRowsAtOnce);
    multiply(weights.gate, inputs, {row, stop}, panels, gate_, pitch, false);
    multiply(weights.up, inputs, {row, stop}, panels, up_, pitch, false);
    for (int r = row; r < stop; ++r) {
      const size_t at = static_cast<size_t>(r) * pitch + first;
      kernels_->elementwise->gate(shape_.activation, gate_ + at, up_ + at, size);
    }
    if (!takes_codes(weights.down.format)) continue;
    matmul_kernels(*kernels_, shape_.limits.down)
        .quantize_rows(gate_ + static_cast<size_t>(row) * pitch + first, pitch, stop - row, row,
                       quantized_columns(gated_, begin, end));
  }
}

void Plan::down(const LayerWeights& weights, int thread) {
  multiply(weights.down, gated_, {0, step_.tokens}, share(panels_of(hidden_), thread), x_,
           static_cast<size_t>(hidden_), true);
}

void Plan::head(int thread) {
  const int count = step_.logits;
  const QuantizedRows inputs =
      normalise(thread, weights_.norm, step_.logits_tokens, count, nullptr, shape_.limits.head);
  const Span panels = share(panels_of(shape_.vocabulary_size), thread);
  if (panels.begin >= panels.end) return;
  multiply(weights_.head, inputs, {0, count}, panels, logits_, logits_pitch_, false);
  if (shape_.logits_soft_cap > 0.0f) cap_logits(panels);
}

void Plan::cap_logits(Span panels) {
  const int begin = panels.begin * kPanelRows;
  const int end = std::min(panels.end * kPanelRows, shape_.vocabulary_size);
  for (int row = 0; row < step_.logits; ++row)
    kernels_->elementwise->soft_cap(logits_ + static_cast<size_t>(row) * logits_pitch_ + begin,
                                    shape_.logits_soft_cap, static_cast<size_t>(end - begin));
}

QuantizedRows Plan::normalise(int thread, const float* norm, const int* which, int count,
                              const int32_t* order, int limit) {
  const bool alone = few(count);
  const Inputs& inputs = alone ? few_normed_[static_cast<size_t>(thread)] : normed_;
  QuantizedRows out = inputs.rows;
  out.limit = limit;
  const Span rows = alone ? Span{0, count} : share(count, thread);
  const size_t pitch = static_cast<size_t>(hidden_);
  for (int row = rows.begin; row < rows.end; ++row) {
    const size_t from = static_cast<size_t>(which ? which[row] : row);
    float* const to = inputs.floats + static_cast<size_t>(row) * pitch;
    float* const straight = order ? reordered_[static_cast<size_t>(thread)] : to;
    kernels_->elementwise->rms_norm(x_ + from * pitch, norm, shape_.epsilon, pitch, straight);
    if (order) reorder(straight, order, pitch, to);
  }
  if (quantises_hidden_ && rows.end > rows.begin)
    matmul_kernels(*kernels_, limit)
        .quantize_rows(inputs.floats + static_cast<size_t>(rows.begin) * pitch, pitch,
                       rows.end - rows.begin, rows.begin, out);
  if (!alone) pool_.barrier();
  return out;
}

QuantizedRows Plan::quantise_mixed(int thread, const PackedMatrix& weights, const int32_t* order) {
  if (!takes_codes(weights.format)) return mixed_inputs_;
  const bool alone = few(step_.tokens);
  const QuantizedRows& out = alone ? few_mixed_[static_cast<size_t>(thread)] : mixed_inputs_;
  const Span rows = alone ? Span{0, step_.tokens} : share(step_.tokens, thread);
  const size_t pitch = static_cast<size_t>(queries_);
  const MatmulKernels& kernels = matmul_kernels(*kernels_, out.limit);
  float* const reordered = reordered_[static_cast<size_t>(thread)];
  for (int row = rows.begin; order && row < rows.end; ++row) {
    reorder(mixed_ + static_cast<size_t>(row) * pitch, order, pitch, reordered);
    kernels.quantize_rows(reordered, pitch, 1, row, out);
  }
  if (!order && rows.end > rows.begin)
    kernels.quantize_rows(mixed_ + static_cast<size_t>(rows.begin) * pitch, pitch,
                          rows.end - rows.begin, rows.begin, out);
  if (!alone) pool_.barrier();
  return out;
}

void Plan::multiply(const PackedMatrix& weights, const QuantizedRows& inputs, Span rows,
                    Span panels, float* out, size_t pitch, bool add) const {
  if (panels.begin < panels.end)
    matmul_kernels(*kernels_, inputs.limit)
        .matmul(weights, inputs, rows.begin, rows.end, panels.begin, panels.end, out, pitch, add);
}

Span Plan::share(int count, int thread, int unit) const {
  return triptych::share(count, thread, pool_.size(), unit);
}

bool Plan::few(int rows) const { return rows <= kFewRows && pool_.size() > 1; }

void Plan::mark([[maybe_unused]] int thread, [[maybe_unused]] Phase phase) {
#if defined(TRIPTYCH_PROFILE) && defined(__x86_64__)
  if (thread != 0) return;
  const uint64_t now = __rdtsc();
  if (phase != kPhases) cycles_[phase] += now - marked_;
  marked_ = now;
#endif
}

}  // namespace triptych
