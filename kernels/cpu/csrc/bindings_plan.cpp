#include "bindings_plan.h"

#include <pybind11/stl.h>

#include <climits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "array_view.h"
#include "checksum.h"
#include "plan.h"

namespace py = pybind11;

namespace triptych {
namespace {

// Named things from Python that the plan reads. Arrays are kept alive, never copied.
class Weights {
 public:
  explicit Weights(const py::dict& items) : items_(items) {}

  // A matrix is (GGML type, rows, columns, packed bytes).
  PackedMatrix matrix(const std::string& name) const {
    const auto [type, rows, columns, bytes] =
        item(name).cast<std::tuple<int, int, int, py::array>>();
    const WeightFormat format = format_of_ggml_type(type);
    const auto* data = column<uint8_t>(
        bytes, name.c_str(), static_cast<py::ssize_t>(packed_bytes(format, rows, columns)));
    if (reinterpret_cast<uintptr_t>(data) % kPackedAlignment != 0)
      throw py::value_error(name + " is not aligned to " + std::to_string(kPackedAlignment));
    return packed_view(format, rows, columns, data);
  }

  const float* vector(const std::string& name, int size) const {
    return column<float>(item(name).cast<py::array>(), name.c_str(), size);
  }

  const float* vector_if_any(const std::string& name, int size) const {
    return items_.contains(name.c_str()) ? vector(name, size) : nullptr;
  }

 private:
  py::object item(const std::string& name) const {
    if (!items_.contains(name.c_str())) throw py::key_error(name);
    return items_[name.c_str()];
  }

  py::dict items_;
};

PlanWeights read_weights(const Weights& from, const PlanShape& shape) {
  const int queries = shape.heads * shape.kv.head_dim, keys = shape.kv.kv_heads * shape.kv.head_dim;
  PlanWeights out{
      from.matrix("embedding"), from.matrix("head"), from.vector("norm", shape.hidden), {}};
  for (int i = 0; i < shape.kv.layers; ++i) {
    const std::string prefix = std::to_string(i) + ".";
    LayerWeights layer{};
    layer.attention_norm = from.vector(prefix + "attention_norm", shape.hidden);
    layer.q = from.matrix(prefix + "q");
    layer.k = from.matrix(prefix + "k");
    layer.v = from.matrix(prefix + "v");
    layer.output = from.matrix(prefix + "output");
    layer.q_bias = from.vector_if_any(prefix + "q_bias", queries);
    layer.k_bias = from.vector_if_any(prefix + "k_bias", keys);
    layer.v_bias = from.vector_if_any(prefix + "v_bias", keys);
    layer.mlp_norm = from.vector(prefix + "mlp_norm", shape.hidden);
    layer.gate = from.matrix(prefix + "gate");
    layer.up = from.matrix(prefix + "up");
    layer.down = from.matrix(prefix + "down");
    out.layers.push_back(layer);
  }
  return out;
}

template <typename T>
T field(const py::dict& fields, const char* name) {
  if (!fields.contains(name)) throw py::key_error(name);
  return fields[name].cast<T>();
}

PlanShape read_shape(const py::dict& fields) {
  PlanShape shape;
  shape.vocabulary_size = field<int>(fields, "vocabulary_size");
  shape.hidden = field<int>(fields, "hidden_size");
  shape.intermediate = field<int>(fields, "intermediate_size");
  shape.heads = field<int>(fields, "num_heads");
  shape.max_length = field<int>(fields, "max_model_len");
  shape.window = field<std::optional<int>>(fields, "sliding_window").value_or(INT_MAX);
  shape.epsilon = field<float>(fields, "norm_epsilon");
  shape.activation = activation_of(field<std::string>(fields, "activation"));
  shape.activation_limit = field<int>(fields, "activation_limit");
  shape.frequencies = field<std::vector<float>>(fields, "frequencies");
  shape.kv = {field<int>(fields, "num_layers"), field<int>(fields, "num_blocks"),
              field<int>(fields, "block_size"), field<int>(fields, "num_kv_heads"),
              field<int>(fields, "head_dim"),   kv_type_of(field<std::string>(fields, "kv_dtype"))};
  return shape;
}

// A plan and what it reads.
class BoundPlan {
 public:
  BoundPlan(const py::dict& fields, const py::dict& weights, int threads,
            const std::vector<int>& affinity)
      : weights_(weights) {
    PlanShape shape = read_shape(fields);
    PlanWeights views = read_weights(Weights(weights), shape);
    plan_ = std::make_unique<Plan>(std::move(shape), std::move(views), threads, affinity);
  }

  void reserve(int tokens) { plan_->reserve(tokens); }
  void pin_caller() const { plan_->pin_caller(); }
  size_t kv_bytes() const { return plan_->kv_bytes(); }
  std::vector<uint64_t> cycles() const { return plan_->cycles(); }

  void step(const py::array& token_ids, const py::array& positions, const py::array& slots,
            const py::array& row_starts, const py::array& kv_lengths, const py::array& logits_rows,
            const py::array& block_tables, py::array& logits) {
    const py::ssize_t tokens = token_ids.size(), rows = kv_lengths.size();
    if (tokens < 1 || rows < 1 || tokens > INT_MAX) throw py::value_error("a step has tokens");
    StepView view{};
    view.token_ids = column<int32_t>(token_ids, "token_ids", tokens);
    view.positions = column<int32_t>(positions, "positions", tokens);
    view.slots = column<int32_t>(slots, "slots", tokens);
    view.row_starts = column<int32_t>(row_starts, "row_starts", rows + 1);
    view.kv_lengths = column<int32_t>(kv_lengths, "kv_lengths", rows);
    view.logits_rows = column<int32_t>(logits_rows, "logits_rows", rows);
    view.block_tables = triptych::view<int32_t>(block_tables, "block_tables", 2);
    if (block_tables.shape(0) != rows) throw py::value_error("block_tables has other rows");
    view.table_width = static_cast<int>(block_tables.shape(1));
    view.tokens = static_cast<int>(tokens);
    view.rows = static_cast<int>(rows);
    float* out = writable_view<float>(logits, "logits", 2);
    const auto pitch = static_cast<size_t>(logits.shape(1));
    if (pitch < static_cast<size_t>(plan_->vocabulary_size()))
      throw py::value_error("logits are narrower than the vocabulary");
    py::gil_scoped_release nogil;
    plan_->reserve(view.tokens);
    plan_->step(view, out, pitch);
  }

 private:
  py::dict weights_;
  std::unique_ptr<Plan> plan_;
};

// Packs a row-major matrix of GGML blocks into memory of packed_bytes() bytes.
void pack_into(int ggml_type, int rows, int columns, const py::array& source,
               py::array& destination) {
  const WeightFormat format = format_of_ggml_type(ggml_type);
  const auto* from = column<uint8_t>(source, "source",
                                     static_cast<py::ssize_t>(source_bytes(format, rows, columns)));
  uint8_t* to = writable_view<uint8_t>(destination, "destination", 1);
  if (destination.shape(0) != static_cast<py::ssize_t>(packed_bytes(format, rows, columns)))
    throw py::value_error("destination has not the bytes of the packed matrix");
  py::gil_scoped_release nogil;
  pack(format, from, rows, columns, to);
}

uint64_t checksum_of(const py::array& bytes) {
  const auto* data = view<uint8_t>(bytes, "bytes", 1);
  const auto size = static_cast<size_t>(bytes.size());
  py::gil_scoped_release nogil;
  return checksum(data, size);
}

}  // namespace

KvType kv_type_of(const std::string& name) {
  if (name == "float32") return KvType::kFloat32;
  if (name == "bfloat16") return KvType::kBfloat16;
  if (name == "int8") return KvType::kInt8;
  throw py::value_error("kv_dtype '" + name + "' is not float32, bfloat16 or int8");
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  throw py::value_error("activation '" + name + "' is not silu or gelu_tanh");
}

void bind_plan(py::module_& m) {
  py::class_<BoundPlan>(m, "Plan")
      .def(py::init<const py::dict&, const py::dict&, int, const std::vector<int>&>(),
           py::arg("shape"), py::arg("weights"), py::arg("threads"), py::arg("affinity"))
      .def("reserve", &BoundPlan::reserve, py::arg("tokens"))
      .def("pin_caller", &BoundPlan::pin_caller)
      .def("step", &BoundPlan::step, py::arg("token_ids"), py::arg("positions"), py::arg("slots"),
           py::arg("row_starts"), py::arg("kv_lengths"), py::arg("logits_rows"),
           py::arg("block_tables"), py::arg("logits"))
      .def_property_readonly("kv_bytes", &BoundPlan::kv_bytes)
      .def_property_readonly("cycles", &BoundPlan::cycles);
  m.attr("PACKED_LAYOUT_VERSION") = kPackedLayoutVersion;
  m.def(
      "packed_bytes",
      [](int ggml_type, int rows, int columns) {
        return packed_bytes(format_of_ggml_type(ggml_type), rows, columns);
      },
      py::arg("ggml_type"), py::arg("rows"), py::arg("columns"));
  m.def("pack_into", &pack_into, py::arg("ggml_type"), py::arg("rows"), py::arg("columns"),
        py::arg("source"), py::arg("destination"));
  m.def("checksum", &checksum_of, py::arg("bytes"));
  m.def(
      "kv_block_bytes",
      [](int layers, int block_size, int kv_heads, int head_dim, const std::string& kv_dtype) {
        return KvCache::block_bytes(
            {layers, 1, block_size, kv_heads, head_dim, kv_type_of(kv_dtype)});
      },
      py::arg("layers"), py::arg("block_size"), py::arg("kv_heads"), py::arg("head_dim"),
      py::arg("kv_dtype"));
}

}  // namespace triptych
