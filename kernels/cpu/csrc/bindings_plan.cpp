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
#include "packed_groups.h"
#include "panel_shares.h"
#include "plan.h"

namespace py = pybind11;

namespace triptych {
namespace {

// Named things from Python that the plan reads. Arrays are kept alive, never copied.
class Weights {
 public:
  explicit Weights(const py::dict& items) : items_(items) {}

  // A matrix is (type as weight_type_of has it, rows, columns, packed bytes).
  PackedMatrix matrix(const std::string& name) const {
    const auto [number, rows, columns, bytes] =
        item(name).cast<std::tuple<int, int, int, py::array>>();
    const WeightType type = weight_type_of(number);
    const auto* data = column<uint8_t>(bytes, name.c_str(),
                                       static_cast<py::ssize_t>(packed_bytes(type, rows, columns)));
    if (reinterpret_cast<uintptr_t>(data) % kPackedAlignment != 0)
      throw py::value_error(name + " is not aligned to " + std::to_string(kPackedAlignment));
    return packed_view(type, rows, columns, data);
  }

  const float* vector(const std::string& name, int size) const {
    return column<float>(item(name).cast<py::array>(), name.c_str(), size);
  }

  // Which of `size` inputs a column is for.
  const int32_t* order_if_any(const std::string& name, int size) const {
    if (!items_.contains(name.c_str())) return nullptr;
    const auto* order = column<int32_t>(item(name).cast<py::array>(), name.c_str(), size);
    for (int i = 0; i < size; ++i)
      if (order[i] < 0 || order[i] >= size) throw py::value_error(name + " is out of range");
    return order;
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
    layer.qkv_order = from.order_if_any(prefix + "qkv_order", shape.hidden);
    layer.output_order = from.order_if_any(prefix + "output_order", queries);
    layer.mlp_order = from.order_if_any(prefix + "mlp_order", shape.hidden);
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
  shape.attention_soft_cap =
      field<std::optional<float>>(fields, "attention_soft_cap").value_or(0.0f);
  shape.logits_soft_cap = field<std::optional<float>>(fields, "logits_soft_cap").value_or(0.0f);
  shape.activation = activation_of(field<std::string>(fields, "activation"));
  const auto limits = field<py::dict>(fields, "activation_limits");
  shape.limits = {field<int>(limits, "qkv"), field<int>(limits, "output"),
                  field<int>(limits, "gate_up"), field<int>(limits, "down"),
                  field<int>(limits, "head")};
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
            const py::array& row_starts, const py::array& kv_lengths, const py::array& block_tables,
            const py::array& logits_tokens, const py::array& copy_sources,
            const py::array& copy_targets, py::array& logits) {
    const py::ssize_t tokens = token_ids.size(), rows = kv_lengths.size();
    if (tokens < 1 || rows < 1 || tokens > INT_MAX) throw py::value_error("a step has tokens");
    StepView view{};
    view.token_ids = column<int32_t>(token_ids, "token_ids", tokens);
    view.positions = column<int32_t>(positions, "positions", tokens);
    view.slots = column<int32_t>(slots, "slots", tokens);
    view.row_starts = column<int32_t>(row_starts, "row_starts", rows + 1);
    view.kv_lengths = column<int32_t>(kv_lengths, "kv_lengths", rows);
    view.logits_tokens = column<int32_t>(logits_tokens, "logits_tokens", logits_tokens.size());
    view.copy_sources = column<int32_t>(copy_sources, "copy_sources", copy_sources.size());
    view.copy_targets = column<int32_t>(copy_targets, "copy_targets", copy_sources.size());
    view.block_tables = triptych::view<int32_t>(block_tables, "block_tables", 2);
    if (block_tables.shape(0) != rows) throw py::value_error("block_tables has other rows");
    view.table_width = static_cast<int>(block_tables.shape(1));
    view.tokens = static_cast<int>(tokens);
    view.rows = static_cast<int>(rows);
    view.logits = static_cast<int>(logits_tokens.size());
    view.copies = static_cast<int>(copy_sources.size());
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

uint8_t* packed_destination(py::array& bytes, WeightType type, int rows, int columns) {
  uint8_t* to = writable_view<uint8_t>(bytes, "destination", 1);
  if (bytes.shape(0) != static_cast<py::ssize_t>(packed_bytes(type, rows, columns)))
    throw py::value_error("destination has not the bytes of the packed matrix");
  return to;
}

// Packs a row-major matrix of GGML blocks into memory of packed_bytes() bytes.
void pack_into(int ggml_type, int rows, int columns, const py::array& source,
               py::array& destination) {
  const WeightType type = weight_type_of(ggml_type);
  if (type.group_blocks > 0) throw py::value_error("groups are packed by pack_groups_into");
  const auto* from = column<uint8_t>(source, "source",
                                     static_cast<py::ssize_t>(source_bytes(type, rows, columns)));
  uint8_t* to = packed_destination(destination, type, rows, columns);
  py::gil_scoped_release nogil;
  pack(type, from, rows, columns, to);
}

// Packs groups of codes: codes uint8 [rows, columns]; scales and zeros, the bits of float16, uint16
// [rows, groups].
void pack_groups_into(int number, const py::array& codes, const py::array& scales,
                      const py::array& zeros, py::array& destination) {
  const WeightType type = weight_type_of(number);
  if (type.group_blocks == 0) throw py::value_error("not a type of groups");
  const auto* from = view<uint8_t>(codes, "codes", 2);
  const auto rows = static_cast<int>(codes.shape(0)), columns = static_cast<int>(codes.shape(1));
  uint8_t* to = packed_destination(destination, type, rows, columns);
  const GroupSource source{from, view<uint16_t>(scales, "scales", 2),
                           view<uint16_t>(zeros, "zeros", 2)};
  for (const py::array* each : {&scales, &zeros})
    if (each->shape(0) != rows || each->shape(1) != columns / (type.group_blocks * kBlockColumns))
      throw py::value_error("scales and zeros must have a column for each group");
  py::gil_scoped_release nogil;
  pack_groups(packed_view(type, rows, columns, to), source, to);
}

// [threads][matrices] of (first panel, last panel + 1).
std::vector<std::vector<std::pair<int, int>>> panel_shares_of(const std::vector<int>& rows,
                                                              int threads, bool gate) {
  if (threads < 1) throw py::value_error("threads must be at least 1");
  std::vector<int> panels;
  for (const int each : rows) panels.push_back(panels_of(each));
  std::vector<std::vector<std::pair<int, int>>> out;
  for (const std::vector<Span>& spans : panel_shares(panels, threads, gate ? kGatePanels : 1)) {
    out.emplace_back();
    for (const Span& span : spans) out.back().emplace_back(span.begin, span.end);
  }
  return out;
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
           py::arg("row_starts"), py::arg("kv_lengths"), py::arg("block_tables"),
           py::arg("logits_tokens"), py::arg("copy_sources"), py::arg("copy_targets"),
           py::arg("logits"))
      .def_property_readonly("kv_bytes", &BoundPlan::kv_bytes)
      .def_property_readonly("cycles", &BoundPlan::cycles);
  m.attr("PACKED_LAYOUT_VERSION") = kPackedLayoutVersion;
  m.def(
      "packed_bytes",
      [](int ggml_type, int rows, int columns) {
        return packed_bytes(weight_type_of(ggml_type), rows, columns);
      },
      py::arg("ggml_type"), py::arg("rows"), py::arg("columns"));
  m.def("pack_into", &pack_into, py::arg("ggml_type"), py::arg("rows"), py::arg("columns"),
        py::arg("source"), py::arg("destination"));
  m.def("pack_groups_into", &pack_groups_into, py::arg("type"), py::arg("codes"), py::arg("scales"),
        py::arg("zeros"), py::arg("destination"));
  m.def("panel_shares", &panel_shares_of, py::arg("rows"), py::arg("threads"), py::arg("gate"));
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
