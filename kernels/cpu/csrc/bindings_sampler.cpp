// The stateful sampler. Values of parameters are checked in Python, where both samplers do it.
#include "bindings_sampler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "array_view.h"
#include "dispatch.h"
#include "sampler.h"

namespace py = pybind11;

namespace triptych {
namespace {

// Numbers from a list, a tuple, an array of any kind of integers, or another sequence.
std::vector<int64_t> numbers_of(const py::handle& from) {
  if (py::isinstance<py::array>(from)) {
    const auto array =
        py::cast<py::array_t<int64_t, py::array::c_style | py::array::forcecast>>(from);
    return {array.data(), array.data() + array.size()};
  }
  std::vector<int64_t> numbers;
  numbers.reserve(py::len_hint(from));
  for (const py::handle each : py::reinterpret_borrow<py::object>(from))
    numbers.push_back(each.cast<int64_t>());
  return numbers;
}

// Token ids; -1, which no vocabulary has, stands for those that no int32 holds.
int32_t token_id_of(int64_t number) {
  return number < 0 || number > INT32_MAX ? -1 : static_cast<int32_t>(number);
}

std::vector<int32_t> token_ids_of(const py::handle& from) {
  const std::vector<int64_t> numbers = numbers_of(from);
  std::vector<int32_t> ids(numbers.size());
  std::transform(numbers.begin(), numbers.end(), ids.begin(), token_id_of);
  return ids;
}

template <typename T>
T clamped(const py::object& number) {
  constexpr int64_t kMost = std::numeric_limits<T>::max();
  return static_cast<T>(std::min(number.cast<int64_t>(), kMost));
}

SequenceParams params_of(const py::object& from) {
  SequenceParams params;
  params.temperature = from.attr("temperature").cast<float>();
  params.filters.top_n_sigma = from.attr("top_n_sigma").cast<float>();
  params.filters.top_k = clamped<int32_t>(from.attr("top_k"));
  params.filters.typical_p = from.attr("typical_p").cast<float>();
  params.filters.top_p = from.attr("top_p").cast<float>();
  params.filters.min_p = from.attr("min_p").cast<float>();
  params.repetition_penalty = from.attr("repetition_penalty").cast<float>();
  params.frequency_penalty = from.attr("frequency_penalty").cast<float>();
  params.presence_penalty = from.attr("presence_penalty").cast<float>();
  params.no_repeat_ngram_size = clamped<uint32_t>(from.attr("no_repeat_ngram_size"));
  params.seed = from.attr("seed").cast<uint64_t>();
  params.choice = from.attr("choice").cast<uint32_t>();
  for (const py::handle each : from.attr("logit_bias")) {
    const auto [id, bias] = each.cast<std::pair<int64_t, float>>();
    params.logit_bias.emplace_back(token_id_of(id), bias);
  }
  const py::object allowed = from.attr("allowed_token_ids");
  params.restricted = !allowed.is_none();
  if (params.restricted) params.allowed_token_ids = token_ids_of(allowed);
  for (const py::handle word : from.attr("bad_words"))
    params.bad_words.push_back(token_ids_of(word));
  params.masked_token_ids = token_ids_of(from.attr("masked_token_ids"));
  params.mask_until = clamped<uint32_t>(from.attr("mask_until"));
  params.logprobs = from.attr("logprobs").cast<int64_t>();
  return params;
}

template <typename T>
py::array_t<T> array_of(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple tuple_of(const TokenLogprobs& of) {
  return py::make_tuple(of.logprob, of.rank, array_of(of.top_ids), array_of(of.top_logprobs));
}

class BoundSampler {
 public:
  BoundSampler(int64_t vocabulary_size, bool processed_logprobs)
      : sampler_(checked(vocabulary_size), processed_logprobs) {}

  void open(int64_t sequence_id, const py::object& params, const py::object& prompt_ids,
            const py::object& output_ids) {
    if (!sampler_.open(sequence_id, params_of(params), token_ids_of(prompt_ids),
                       token_ids_of(output_ids)))
      throw py::value_error("sequence " + std::to_string(sequence_id) + " is open already");
  }

  void append(const py::object& sequence_ids, const py::object& token_ids) {
    const std::vector<int64_t> ids = numbers_of(sequence_ids);
    const std::vector<int32_t> tokens = token_ids_of(token_ids);
    if (ids.size() != tokens.size())
      throw py::value_error("as many token_ids as sequence_ids are needed");
    std::vector<SequenceState*> sequences;
    for (const int64_t id : ids) sequences.push_back(find(id));
    for (size_t i = 0; i < ids.size(); ++i) sequences[i]->append(tokens[i]);
  }

  void close(int64_t sequence_id) {
    if (!sampler_.close(sequence_id)) throw py::key_error(std::to_string(sequence_id));
  }

  size_t open_sequences() const { return sampler_.open_sequences(); }

  py::tuple draw(const py::array& logits, const py::object& sequence_ids,
                 const py::object& logits_rows, const py::object& allowed_masks) {
    const std::vector<int64_t> ids = numbers_of(sequence_ids);
    const std::vector<const float*> rows = rows_of(logits, logits_rows, ids.size());
    std::vector<Sample> samples(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) samples[i] = {find(ids[i]), rows[i], nullptr};
    const std::vector<py::array> held = add_masks(allowed_masks, samples);
    py::array_t<int32_t> tokens(static_cast<py::ssize_t>(ids.size()));
    int32_t* out = tokens.mutable_data();
    std::vector<std::pair<size_t, TokenLogprobs>> logprobs;
    {
      py::gil_scoped_release nogil;
      logprobs = sampler_.draw(samples, *active_kernels().sampler, out);
    }
    py::list reported;
    for (const auto& [index, of] : logprobs) reported.append(py::make_tuple(index, tuple_of(of)));
    return py::make_tuple(tokens, reported);
  }

  py::list score(const py::array& logits, const py::object& logits_rows,
                 const py::object& token_ids, int64_t top) {
    const std::vector<int64_t> tokens = numbers_of(token_ids);
    const std::vector<const float*> rows = rows_of(logits, logits_rows, tokens.size());
    if (top < 0) throw py::value_error("top is negative");
    for (const int64_t token : tokens)
      if (token < 0 || token >= int64_t{sampler_.vocabulary_size()})
        throw py::value_error("token id " + std::to_string(token) + " is not in the vocabulary");
    std::vector<std::optional<TokenLogprobs>> scores(tokens.size());
    {
      py::gil_scoped_release nogil;
      for (size_t i = 0; i < tokens.size(); ++i)
        scores[i] = sampler_.score(rows[i], static_cast<uint32_t>(tokens[i]),
                                   static_cast<size_t>(top), *active_kernels().sampler);
    }
    py::list reported;
    for (const auto& each : scores)
      reported.append(each ? py::object(tuple_of(*each)) : py::object(py::none()));
    return reported;
  }

 private:
  static uint32_t checked(int64_t vocabulary_size) {
    if (vocabulary_size < 1 || vocabulary_size > int64_t{kLargestVocabulary})
      throw py::value_error("vocabulary_size " + std::to_string(vocabulary_size) +
                            " is not within 1 and " + std::to_string(kLargestVocabulary));
    return static_cast<uint32_t>(vocabulary_size);
  }

  SequenceState* find(int64_t id) {
    SequenceState* sequence = sampler_.find(id);
    if (sequence == nullptr) throw py::key_error(std::to_string(id));
    return sequence;
  }

  std::vector<const float*> rows_of(const py::array& logits, const py::object& logits_rows,
                                    size_t samples) const {
    const float* data = view<float>(logits, "logits", 2);
    const py::ssize_t count = logits.shape(0), stride = logits.shape(1);
    if (stride < static_cast<py::ssize_t>(sampler_.vocabulary_size()))
      throw py::value_error("logits have rows of " + std::to_string(stride) +
                            ", fewer than the vocabulary's " +
                            std::to_string(sampler_.vocabulary_size()));
    const std::vector<int64_t> indices = numbers_of(logits_rows);
    if (indices.size() != samples)
      throw py::value_error(std::to_string(indices.size()) + " logits_rows, expected " +
                            std::to_string(samples));
    std::vector<const float*> rows;
    rows.reserve(indices.size());
    for (const int64_t row : indices) {
      if (row < 0 || row >= count)
        throw py::value_error("logits row " + std::to_string(row) + " is not within 0 and " +
                              std::to_string(count - 1));
      rows.push_back(data + row * stride);
    }
    return rows;
  }

  // The arrays that the samples then point into.
  std::vector<py::array> add_masks(const py::object& allowed_masks,
                                   std::vector<Sample>& samples) const {
    std::vector<py::array> held;
    if (allowed_masks.is_none()) return held;
    const auto masks = py::cast<py::sequence>(allowed_masks);
    if (masks.size() != samples.size())
      throw py::value_error("as many allowed_masks as samples are needed");
    const py::ssize_t words = (py::ssize_t{sampler_.vocabulary_size()} + 31) / 32;
    for (size_t i = 0; i < samples.size(); ++i) {
      const py::object mask = masks[i];
      if (mask.is_none()) continue;
      held.push_back(py::cast<py::array>(mask));
      samples[i].allowed_mask = view<uint32_t>(held.back(), "allowed_masks", 1);
      if (held.back().shape(0) < words)
        throw py::value_error("an allowed mask has " + std::to_string(held.back().shape(0)) +
                              " words, the vocabulary needs " + std::to_string(words));
    }
    return held;
  }

  Sampler sampler_;
};

}  // namespace

void bind_sampler(py::module_& m) {
  py::class_<BoundSampler>(m, "Sampler")
      .def(py::init<int64_t, bool>(), py::arg("vocabulary_size"), py::arg("processed_logprobs"))
      .def("open", &BoundSampler::open, py::arg("sequence_id"), py::arg("params"),
           py::arg("prompt_ids"), py::arg("output_ids"))
      .def("append", &BoundSampler::append, py::arg("sequence_ids"), py::arg("token_ids"))
      .def("close", &BoundSampler::close, py::arg("sequence_id"))
      .def("draw", &BoundSampler::draw, py::arg("logits"), py::arg("sequence_ids"),
           py::arg("logits_rows"), py::arg("allowed_masks"))
      .def("score", &BoundSampler::score, py::arg("logits"), py::arg("logits_rows"),
           py::arg("token_ids"), py::arg("top"))
      .def_property_readonly("open_sequences", &BoundSampler::open_sequences);
}

}  // namespace triptych
