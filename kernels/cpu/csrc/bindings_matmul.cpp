// Matrix products one by one, and the machine's limits, as tests and benchmarks call them.
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <numeric>
#include <tuple>
#include <vector>

#include "array_view.h"
#include "bindings_plan.h"
#include "dispatch.h"
#include "memory.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace triptych {
namespace {

// (type as weight_type_of has it, rows, columns, packed bytes).
using BoundMatrix = std::tuple<int, int, int, py::array>;

PackedMatrix matrix_of(const BoundMatrix& bound) {
  const auto& [number, rows, columns, bytes] = bound;
  const WeightType type = weight_type_of(number);
  const auto* data =
      column<uint8_t>(bytes, "matrix", static_cast<py::ssize_t>(packed_bytes(type, rows, columns)));
  if (reinterpret_cast<uintptr_t>(data) % kPackedAlignment != 0)
    throw py::value_error("matrix is not aligned to " + std::to_string(kPackedAlignment));
  return packed_view(type, rows, columns, data);
}

py::array_t<float> unpack_matrix(const BoundMatrix& bound) {
  const PackedMatrix matrix = matrix_of(bound);
  py::array_t<float> out(std::vector<py::ssize_t>{matrix.rows, matrix.columns});
  for (int row = 0; row < matrix.rows; ++row) unpack_row(matrix, row, out.mutable_data(row));
  return out;
}

// The activations of a product: x [rows, columns] float32, and its codes if the format takes them.
class Activations {
 public:
  Activations(const PackedMatrix& matrix, const py::array& x, int limit)
      : floats_(view<float>(x, "x", 2)), rows_(static_cast<int>(x.shape(0))) {
    if (x.shape(1) != matrix.columns)
      throw py::value_error("x has " + std::to_string(x.shape(1)) + " columns, the matrix " +
                            std::to_string(matrix.columns));
    if (limit < 1 || limit > kActivationLimit16)
      throw py::value_error("activation_limit is not within 1 and " +
                            std::to_string(kActivationLimit16));
    const size_t bytes = takes_codes(matrix.format) ? quantized_bytes(rows_, matrix.columns) : 1;
    memory_ = Buffer(bytes);
    view_ = place_quantized_rows(memory_.data(), matrix.columns, limit);
    view_.floats = floats_;
    view_.float_pitch = static_cast<size_t>(matrix.columns);
    if (takes_codes(matrix.format))
      kernels().quantize_rows(floats_, view_.float_pitch, rows_, 0, view_);
  }

  int rows() const { return rows_; }
  const QuantizedRows& view_of_rows() const { return view_; }
  const MatmulKernels& kernels() const { return matmul_kernels(active_kernels(), view_.limit); }

 private:
  const float* floats_;
  int rows_;
  Buffer memory_;
  QuantizedRows view_;
};

void multiply(const PackedMatrix& matrix, const Activations& x, int rows_at_once, int thread,
              int threads, float* out, bool add) {
  const int panels = panels_of(matrix.rows);
  for (int row = 0; row < x.rows(); row += rows_at_once)
    x.kernels().matmul(matrix, x.view_of_rows(), row, std::min(x.rows(), row + rows_at_once),
                       panels * thread / threads, panels * (thread + 1) / threads, out,
                       static_cast<size_t>(matrix.rows), add);
}

// x [m, columns] times the matrix [rows, columns] transposed -> [m, rows], in calls of rows_at_once
// rows and a part of the panels each. With `initial` [m, rows], the sum of both.
py::array_t<float> matmul(const BoundMatrix& bound, const py::array& x, int activation_limit,
                          int rows_at_once, int parts, const py::object& initial) {
  const PackedMatrix matrix = matrix_of(bound);
  if (rows_at_once < 1 || parts < 1) throw py::value_error("rows_at_once and parts start at 1");
  const Activations activations(matrix, x, activation_limit);
  const bool add = !initial.is_none();
  py::array_t<float> out(std::vector<py::ssize_t>{x.shape(0), matrix.rows});
  if (add) {
    const auto array = initial.cast<py::array>();
    const float* from = view<float>(array, "initial", 2);
    if (array.shape(0) != x.shape(0) || array.shape(1) != matrix.rows)
      throw py::value_error("initial must have the shape of the product");
    std::memcpy(out.mutable_data(), from, static_cast<size_t>(out.nbytes()));
  } else {
    std::fill_n(out.mutable_data(), out.size(), NAN);
  }
  for (int part = 0; part < parts; ++part)
    multiply(matrix, activations, rows_at_once, part, parts, out.mutable_data(), add);
  return out;
}

// Codes in the order of columns, whichever their size.
QuantizedBlock block_of(const QuantizedRows& rows, py::ssize_t index) {
  if (rows.limit > kActivationLimit8) return rows.blocks[index];
  const ByteBlock& block = rows.bytes[index];
  QuantizedBlock out{block.scale, block.sum, -block.minus_sums[0], {}};
  for (int i = 0; i < kBlockColumns; ++i) out.codes[byte_column(i)] = block.codes[i];
  return out;
}

// (codes int16 [rows, columns], scales float32, sums float32, code sums int32 [rows, columns / 32])
py::tuple quantize_rows(const py::array& x, int activation_limit) {
  const PackedMatrix any =
      packed_view({WeightFormat::kQ8_0}, 1, static_cast<int>(x.shape(1)), nullptr);
  const Activations activations(any, x, activation_limit);
  const py::ssize_t blocks = x.shape(1) / kBlockColumns;
  const std::vector<py::ssize_t> shape{x.shape(0), blocks};
  py::array_t<int16_t> codes(std::vector<py::ssize_t>{x.shape(0), x.shape(1)});
  py::array_t<float> scales(shape), sums(shape);
  py::array_t<int32_t> code_sums(shape);
  for (py::ssize_t i = 0; i < x.shape(0) * blocks; ++i) {
    const QuantizedBlock block = block_of(activations.view_of_rows(), i);
    std::memcpy(codes.mutable_data() + i * kBlockColumns, block.codes, sizeof block.codes);
    scales.mutable_data()[i] = block.scale;
    sums.mutable_data()[i] = block.sum;
    code_sums.mutable_data()[i] = block.code_sum;
  }
  return py::make_tuple(codes, scales, sums, code_sums);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Seconds of each of `rounds` rounds: x times the next `per_round` matrices (of one shape) in turn,
// the panels shared by a thread on each of `cores`.
std::vector<double> time_matmul(const std::vector<BoundMatrix>& bound, const py::array& x,
                                const std::vector<int>& cores, int rounds, int per_round,
                                int activation_limit) {
  if (bound.empty() || cores.empty()) throw py::value_error("matrices or cores are empty");
  if (per_round < 1) throw py::value_error("per_round starts at 1");
  std::vector<PackedMatrix> matrices;
  for (const BoundMatrix& each : bound) matrices.push_back(matrix_of(each));
  const Activations activations(matrices[0], x, activation_limit);
  for (const PackedMatrix& each : matrices)
    if (each.columns != matrices[0].columns || each.rows != matrices[0].rows)
      throw py::value_error("matrices differ in shape");
  const Buffer out(static_cast<size_t>(x.shape(0)) * static_cast<size_t>(matrices[0].rows) * 4);
  py::gil_scoped_release nogil;
  std::vector<double> seconds;
  ThreadPool pool(static_cast<int>(cores.size()), cores);
  std::thread([&] {  // a thread of its own, so that the caller's is not pinned
    pool.pin_caller();
    size_t next = 0;
    for (int round = 0; round < rounds; ++round, next += static_cast<size_t>(per_round)) {
      const auto start = std::chrono::steady_clock::now();
      pool.run([&](int thread) {
        for (size_t i = next; i < next + static_cast<size_t>(per_round); ++i)
          multiply(matrices[i % matrices.size()], activations, INT_MAX / 2, thread, pool.size(),
                   out.floats(), false);
      });
      seconds.push_back(seconds_since(start));
    }
  })
      .join();
  return seconds;
}

// The most per second of `rounds` rounds, by work(thread, round) on a thread on each of `cores`.
template <typename Work>
double best_rate(const std::vector<int>& cores, int rounds, Work work) {
  if (cores.empty()) throw py::value_error("cores is empty");
  py::gil_scoped_release nogil;
  double best = 0.0;
  ThreadPool pool(static_cast<int>(cores.size()), cores);
  std::vector<double> done(cores.size());
  std::thread([&] {
    pool.pin_caller();
    for (int round = 0; round < rounds; ++round) {
      const auto start = std::chrono::steady_clock::now();
      pool.run([&](int thread) { done[static_cast<size_t>(thread)] = work(thread, round); });
      const double spent = seconds_since(start);
      best = std::max(best, std::accumulate(done.begin(), done.end(), 0.0) / spent);
    }
  }).join();
  return best;
}

double multiply_add_limit(const std::vector<int>& cores, int rounds, int activation_limit) {
  const LimitKernels& limits = *active_kernels().limits;
  const bool bytes = activation_limit <= kActivationLimit8;
  return best_rate(cores, rounds, [&limits, bytes](int, int) {
    return static_cast<double>(bytes ? limits.multiply_add_bytes(uint64_t{1} << 16)
                                     : limits.multiply_adds(uint64_t{1} << 19));
  });
}

// Each round reads the next `per_round` bytes, the threads a part each.
double read_limit(const py::array& bytes, const std::vector<int>& cores, int rounds,
                  size_t per_round) {
  const auto* data = view<uint8_t>(bytes, "bytes", 1);
  const size_t part = per_round / std::max<size_t>(cores.size(), 1) / 256 * 256;
  const size_t turns = static_cast<size_t>(bytes.shape(0)) / per_round;
  if (part == 0 || turns == 0) throw py::value_error("per_round is not within 256 and the bytes");
  const LimitKernels& limits = *active_kernels().limits;
  std::atomic<int32_t> sink{0};
  return best_rate(cores, rounds, [&](int thread, int round) {
    const size_t turn = static_cast<size_t>(round) % turns;
    sink = limits.read(data + turn * per_round + static_cast<size_t>(thread) * part, part);
    return static_cast<double>(part);
  });
}

}  // namespace

void bind_matmul(py::module_& m) {
  m.def("unpack_matrix", &unpack_matrix, py::arg("matrix"));
  m.def("quantize_rows", &quantize_rows, py::arg("x"),
        py::arg("activation_limit") = kActivationLimit16);
  m.def("matmul", &matmul, py::arg("matrix"), py::arg("x"),
        py::arg("activation_limit") = kActivationLimit16, py::arg("rows_at_once") = INT_MAX / 2,
        py::arg("parts") = 1, py::arg("initial") = py::none());
  m.def("time_matmul", &time_matmul, py::arg("matrices"), py::arg("x"), py::arg("cores"),
        py::arg("rounds"), py::arg("per_round"), py::arg("activation_limit") = kActivationLimit16);
  m.def("multiply_add_limit", &multiply_add_limit, py::arg("cores"), py::arg("rounds"),
        py::arg("activation_limit") = kActivationLimit16);
  m.def("read_limit", &read_limit, py::arg("bytes"), py::arg("cores"), py::arg("rounds"),
        py::arg("per_round"));
}

}  // namespace triptych
