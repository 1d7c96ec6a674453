// The plan's kernels one by one, as tests and benchmarks call them.
#include <pybind11/stl.h>

#include <climits>
#include <optional>
#include <string>

#include "array_view.h"
#include "bindings_plan.h"
#include "plan.h"

namespace py = pybind11;

namespace triptych {
namespace {

size_t extent(const py::array& array, int axis) { return static_cast<size_t>(array.shape(axis)); }

py::array_t<float> copy_of(const py::array& array, const char* name, py::ssize_t dimensions) {
  check_view<float>(array, name, dimensions);
  return py::array_t<float>(py::array(array.attr("copy")()));
}

py::array_t<float> rms_norm(const py::array& x, const py::array& weight, float epsilon) {
  py::array_t<float> out = copy_of(x, "x", 2);
  const float* weights = column<float>(weight, "weight", x.shape(1));
  const size_t size = extent(x, 1);
  for (size_t row = 0; row < extent(x, 0); ++row) {
    float* at = out.mutable_data() + row * size;
    active_kernels().elementwise->rms_norm(at, weights, epsilon, size, at);
  }
  return out;
}

py::array_t<float> gate(const std::string& activation, const py::array& gate, const py::array& up) {
  py::array_t<float> out = copy_of(gate, "gate", 1);
  const float* other = column<float>(up, "up", gate.shape(0));
  active_kernels().elementwise->gate(activation_of(activation), out.mutable_data(), other,
                                     extent(gate, 0));
  return out;
}

py::array_t<float> rotate(const py::array& x, const py::array& cosines, const py::array& sines,
                          float scale) {
  py::array_t<float> out = copy_of(x, "x", 3);
  const float* cos = view<float>(cosines, "cosines", 2);
  const float* sin = view<float>(sines, "sines", 2);
  const size_t half = extent(x, 2) / 2;
  for (const py::array& each : {cosines, sines})
    if (each.shape(0) != x.shape(0) || extent(each, 1) != half)
      throw py::value_error("cosines and sines must be [tokens, head_dim / 2]");
  for (size_t token = 0; token < extent(x, 0); ++token)
    for (size_t head = 0; head < extent(x, 1); ++head)
      active_kernels().elementwise->rotate(
          out.mutable_data() + (token * extent(x, 1) + head) * 2 * half, cos + token * half,
          sin + token * half, half, scale);
  return out;
}

py::array_t<float> soft_cap(const py::array& x, float cap) {
  if (!(cap > 0.0f)) throw py::value_error("cap must be positive");
  py::array_t<float> out = copy_of(x, "x", 1);
  active_kernels().elementwise->soft_cap(out.mutable_data(), cap, extent(x, 0));
  return out;
}

// One layer of keys and values with the attention over it.
class BoundKvCache {
 public:
  BoundKvCache(int num_blocks, int block_size, int kv_heads, int head_dim, const std::string& dtype)
      : shape_{1, num_blocks, block_size, kv_heads, head_dim, kv_type_of(dtype)}, cache_(shape_) {}

  // keys and values [tokens, kv_heads, head_dim] -> slots.
  void store(const py::array& slots, const py::array& keys, const py::array& values) {
    const auto* to = column<int32_t>(slots, "slots", keys.shape(0));
    const float* k = token_vectors(keys, "keys", shape_.kv_heads);
    const float* v = token_vectors(values, "values", shape_.kv_heads);
    if (values.shape(0) != keys.shape(0))
      throw py::value_error("values differ from keys in tokens");
    for (size_t token = 0; token < extent(keys, 0); ++token) {
      if (to[token] < 0 || to[token] / shape_.block_size >= shape_.num_blocks)
        throw py::value_error("a slot is out of range");
      for (int head = 0; head < shape_.kv_heads; ++head) {
        const size_t at = (token * extent(keys, 1) + static_cast<size_t>(head)) * extent(keys, 2);
        active_kernels().attention->store(cache_.layer(0), to[token] / shape_.block_size,
                                          to[token] % shape_.block_size, head, k + at, v + at);
      }
    }
  }

  // q [tokens, heads, head_dim], scaled -> the same shape. Split as for `threads` threads. Scores
  // are bounded by `soft_cap` where it is not 0.
  py::array_t<float> attend(const py::array& q, const py::array& block_tables,
                            const py::array& row_starts, const py::array& kv_lengths,
                            std::optional<int> window, int threads, float soft_cap) const {
    StepView step{};
    step.tokens = static_cast<int>(q.shape(0));
    step.rows = static_cast<int>(kv_lengths.shape(0));
    step.row_starts = column<int32_t>(row_starts, "row_starts", kv_lengths.shape(0) + 1);
    step.kv_lengths = column<int32_t>(kv_lengths, "kv_lengths", kv_lengths.shape(0));
    step.block_tables = view<int32_t>(block_tables, "block_tables", 2);
    step.table_width = static_cast<int>(block_tables.shape(1));
    const int longest = step.table_width * shape_.block_size;
    const float* queries = token_vectors(q, "q", -1);
    py::array_t<float> out(std::vector<py::ssize_t>{q.shape(0), q.shape(1), q.shape(2)});
    const int heads = static_cast<int>(q.shape(1)) / shape_.kv_heads;
    AttentionItems items({shape_.kv_heads, threads, window.value_or(INT_MAX), longest});
    items.build(step);
    const Buffer partials(items.most_partials() * static_cast<size_t>(heads) *
                          partial_floats(shape_.head_dim) * sizeof(float));
    const Buffer scratch(attention_scratch(shape_.head_dim, heads) * sizeof(float));
    const size_t pitch = extent(q, 1) * extent(q, 2);
    const AttentionPlaces places{
        queries, pitch,           out.mutable_data(),       pitch,   partials.floats(),
        heads,   shape_.head_dim, window.value_or(INT_MAX), soft_cap};
    const AttentionKernels& kernels = *active_kernels().attention;
    for (const AttentionItem& item : items.items())
      kernels.attend(cache_.layer(0), work_of(step, places, item), nullptr, scratch.floats());
    for (const AttentionMerge& merge : items.merges())
      for (int head = 0; head < heads; ++head)
        merge_head(kernels, places, merge, head, scratch.floats());
    return out;
  }

  size_t num_bytes() const { return cache_.num_bytes(); }

 private:
  const float* token_vectors(const py::array& array, const char* name, int heads) const {
    const float* data = view<float>(array, name, 3);
    if ((heads >= 0 && array.shape(1) != heads) || array.shape(2) != shape_.head_dim)
      throw py::value_error(std::string(name) + " has other heads or head_dim than the cache");
    return data;
  }

  KvShape shape_;
  KvCache cache_;
};

}  // namespace

void bind_ops(py::module_& m) {
  m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("epsilon"));
  m.def("gate", &gate, py::arg("activation"), py::arg("gate"), py::arg("up"));
  m.def("soft_cap", &soft_cap, py::arg("x"), py::arg("cap"));
  m.def("rotate", &rotate, py::arg("x"), py::arg("cosines"), py::arg("sines"), py::arg("scale"));
  py::class_<BoundKvCache>(m, "KvCache")
      .def(py::init<int, int, int, int, const std::string&>(), py::arg("num_blocks"),
           py::arg("block_size"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("dtype"))
      .def("store", &BoundKvCache::store, py::arg("slots"), py::arg("keys"), py::arg("values"))
      .def("attend", &BoundKvCache::attend, py::arg("q"), py::arg("block_tables"),
           py::arg("row_starts"), py::arg("kv_lengths"), py::arg("window"), py::arg("threads"),
           py::arg("soft_cap") = 0.0f)
      .def_property_readonly("num_bytes", &BoundKvCache::num_bytes);
}

}  // namespace triptych
