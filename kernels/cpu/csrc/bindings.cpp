#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <string>
#include <vector>

#include "array_view.h"
#include "bindings_plan.h"
#include "dispatch.h"
#include "philox.h"
#include "sampler.h"

namespace py = pybind11;

namespace {

using triptych::column;
using triptych::view;

void check_temperatures(const float* temperature, py::ssize_t rows) {
  for (py::ssize_t i = 0; i < rows; ++i)
    if (!(temperature[i] >= 0.0f && temperature[i] < HUGE_VALF))
      throw py::value_error("temperature is negative or not finite");
}

void check_starts(const int32_t* starts, py::ssize_t rows, py::ssize_t count) {
  bool ascending = starts[0] == 0 && starts[rows] == count;
  for (py::ssize_t i = 0; i < rows; ++i) ascending &= starts[i] <= starts[i + 1];
  if (!ascending)
    throw py::value_error("banned_starts must ascend from 0 to the number of banned_ids");
}

// The part of a batch that is the matrix.
triptych::SampleBatch batch_over(const py::array& logits, py::ssize_t vocabulary_size) {
  triptych::SampleBatch batch{};
  batch.logits = view<float>(logits, "logits", 2);
  const py::ssize_t stride = logits.shape(1);
  if (vocabulary_size < 1 || vocabulary_size > stride || stride > INT32_MAX)
    throw py::value_error("vocabulary_size " + std::to_string(vocabulary_size) +
                          " is not within 1 and the row length " + std::to_string(stride));
  batch.rows = static_cast<size_t>(logits.shape(0));
  batch.stride = static_cast<size_t>(stride);
  batch.vocabulary_size = static_cast<uint32_t>(vocabulary_size);
  return batch;
}

py::array_t<int32_t> sample(const py::array& logits, const py::array& temperature,
                            const py::array& top_k, const py::array& top_p, const py::array& min_p,
                            const py::array& seed, const py::array& choice,
                            const py::array& position, const py::array& banned_ids,
                            const py::array& banned_starts, py::ssize_t vocabulary_size) {
  triptych::SampleBatch batch = batch_over(logits, vocabulary_size);
  const py::ssize_t rows = logits.shape(0);
  batch.temperature = column<float>(temperature, "temperature", rows);
  check_temperatures(batch.temperature, rows);
  batch.top_k = column<int32_t>(top_k, "top_k", rows);
  batch.top_p = column<float>(top_p, "top_p", rows);
  batch.min_p = column<float>(min_p, "min_p", rows);
  batch.seed = column<uint64_t>(seed, "seed", rows);
  batch.choice = column<uint32_t>(choice, "choice", rows);
  batch.position = column<uint32_t>(position, "position", rows);
  batch.banned_ids = view<int32_t>(banned_ids, "banned_ids", 1);
  batch.banned_starts = column<int32_t>(banned_starts, "banned_starts", rows + 1);
  check_starts(batch.banned_starts, rows, banned_ids.shape(0));

  py::array_t<int32_t> tokens(rows);
  int32_t* out = tokens.mutable_data();
  const triptych::SamplerKernels& kernels = *triptych::active_kernels().sampler;
  {
    py::gil_scoped_release nogil;
    triptych::sample(batch, kernels, out);
  }
  return tokens;
}

// The columns of a batch, read from one tuple per row.
struct RowColumns {
  std::vector<float> temperature, top_p, min_p;
  std::vector<int32_t> top_k, banned_ids, banned_starts{0};
  std::vector<uint64_t> seed;
  std::vector<uint32_t> choice, position;

  void add(const py::tuple& row) {
    if (row.size() != 8) throw py::value_error("a row has 8 values");
    temperature.push_back(row[0].cast<float>());
    top_k.push_back(row[1].cast<int32_t>());
    top_p.push_back(row[2].cast<float>());
    min_p.push_back(row[3].cast<float>());
    seed.push_back(row[4].cast<uint64_t>());
    choice.push_back(row[5].cast<uint32_t>());
    position.push_back(row[6].cast<uint32_t>());
    for (const py::handle id : row[7].cast<py::tuple>()) banned_ids.push_back(id.cast<int32_t>());
    banned_starts.push_back(static_cast<int32_t>(banned_ids.size()));
    // Written so that NaN fails: every comparison with NaN is false.
    const float p = top_p.back(), m = min_p.back();
    if (!(p >= 0.0f && p <= 1.0f)) throw py::value_error("top_p is not within 0 and 1");
    if (!(m >= 0.0f && m <= 1.0f)) throw py::value_error("min_p is not within 0 and 1");
  }
};

std::vector<int32_t> sample_rows(const py::array& logits, const py::list& rows,
                                 py::ssize_t vocabulary_size) {
  triptych::SampleBatch batch = batch_over(logits, vocabulary_size);
  if (rows.size() != batch.rows) throw py::value_error("one row of values for each row of logits");
  RowColumns columns;
  for (const py::handle row : rows) columns.add(row.cast<py::tuple>());
  check_temperatures(columns.temperature.data(), static_cast<py::ssize_t>(batch.rows));
  batch.temperature = columns.temperature.data();
  batch.top_k = columns.top_k.data();
  batch.top_p = columns.top_p.data();
  batch.min_p = columns.min_p.data();
  batch.seed = columns.seed.data();
  batch.choice = columns.choice.data();
  batch.position = columns.position.data();
  batch.banned_ids = columns.banned_ids.data();
  batch.banned_starts = columns.banned_starts.data();
  std::vector<int32_t> tokens(batch.rows);
  const triptych::SamplerKernels& kernels = *triptych::active_kernels().sampler;
  {
    py::gil_scoped_release nogil;
    triptych::sample(batch, kernels, tokens.data());
  }
  return tokens;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels, one variant per instruction set";
  m.def("sample", &sample, py::arg("logits"), py::arg("temperature"), py::arg("top_k"),
        py::arg("top_p"), py::arg("min_p"), py::arg("seed"), py::arg("choice"), py::arg("position"),
        py::arg("banned_ids"), py::arg("banned_starts"), py::arg("vocabulary_size"));
  m.def("sample_rows", &sample_rows, py::arg("logits"), py::arg("rows"),
        py::arg("vocabulary_size"));
  m.def("philox4x32", &triptych::philox4x32, py::arg("counter"), py::arg("key0"), py::arg("key1"));
  m.def("active_isa", [] { return triptych::active_kernels().name; });
  m.def("supported_isas", &triptych::supported_isas);
  m.def("select_isa", &triptych::select_isa, py::arg("name"));
  triptych::bind_plan(m);
  triptych::bind_ops(m);
  triptych::bind_matmul(m);
}
