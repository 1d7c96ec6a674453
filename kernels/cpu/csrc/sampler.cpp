#include "sampler.h"

#include <algorithm>

#include "gumbel_draw.h"

namespace triptych {
namespace {

constexpr int32_t kNoToken = -1;

bool drawable(const Peak& peak) { return peak.valid && peak.value >= -FLT_MAX; }

}  // namespace

bool Sampler::open(int64_t id, SequenceParams params, const std::vector<int32_t>& prompt_ids,
                   const std::vector<int32_t>& output_ids) {
  if (sequences_.count(id)) return false;
  sequences_.emplace(id,
                     SequenceState(std::move(params), vocabulary_size_, prompt_ids, output_ids));
  return true;
}

SequenceState* Sampler::find(int64_t id) {
  const auto at = sequences_.find(id);
  return at == sequences_.end() ? nullptr : &at->second;
}

std::vector<std::pair<size_t, TokenLogprobs>> Sampler::draw(const std::vector<Sample>& samples,
                                                            const SamplerKernels& kernels,
                                                            int32_t* tokens) {
  std::vector<std::pair<size_t, TokenLogprobs>> logprobs;
  for (size_t i = 0; i < samples.size(); ++i) {
    TokenLogprobs of_token;
    tokens[i] = draw_one(samples[i], kernels, of_token);
    if (tokens[i] != kNoToken && samples[i].sequence->params().logprobs >= 0)
      logprobs.emplace_back(i, std::move(of_token));
  }
  return logprobs;
}

int32_t Sampler::draw_one(const Sample& sample, const SamplerKernels& kernels,
                          TokenLogprobs& logprobs) {
  const SequenceState& sequence = *sample.sequence;
  const SequenceParams& params = sequence.params();
  const Peak peak = kernels.peak(sample.logits, vocabulary_size_);
  if (!drawable(peak)) return kNoToken;
  const Row raw{sample.logits, vocabulary_size_, peak, 1.0};

  Row row = raw;
  if (sample.allowed_mask != nullptr || !sequence.leaves_rows_alone()) {
    sequence.modify(sample.logits, sample.allowed_mask, scratch_.logits);
    row.logits = scratch_.logits.data();
    row.peak = kernels.peak(row.logits, vocabulary_size_);
    if (!drawable(row.peak)) return kNoToken;
  }
  const bool greedy = params.temperature == 0.0f;
  Kept kept = keep_all(row);
  auto token = static_cast<int32_t>(row.peak.id);
  if (!greedy) {
    row.inverse_temperature = 1.0 / static_cast<double>(params.temperature);
    kept = apply_filters(row, params.filters, kernels, scratch_);
    const Noise noise{params.seed, params.choice, sequence.position()};
    token = draw_token(row, kept, noise, kernels, scratch_);
  }
  if (params.logprobs < 0) return token;
  const auto id = static_cast<uint32_t>(token);
  const size_t top = std::min<size_t>(static_cast<size_t>(params.logprobs), vocabulary_size_);
  logprobs = processed_logprobs_ ? kept_logprobs(row, kept, id, top, kernels, scratch_)
                                 : row_logprobs(raw, id, top, kernels, scratch_);
  return token;
}

std::optional<TokenLogprobs> Sampler::score(const float* logits, uint32_t token, size_t top,
                                            const SamplerKernels& kernels) {
  const Peak peak = kernels.peak(logits, vocabulary_size_);
  if (!drawable(peak)) return std::nullopt;
  top = std::min<size_t>(top, vocabulary_size_);
  return row_logprobs({logits, vocabulary_size_, peak, 1.0}, token, top, kernels, scratch_);
}

}  // namespace triptych
