// The only file here that knows Python: converts arguments, names errors.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_pool.h"
#include "errors.h"
#include "kv_cache.h"
#include "row.h"
#include "step_writer.h"

namespace py = pybind11;

namespace triptych {
namespace {

int64_t AsInt64(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

int32_t AsInt32(PyObject* object) {
  const int64_t value = AsInt64(object);
  if (value < INT32_MIN || value > INT32_MAX) {
    throw std::overflow_error(std::to_string(value) + " does not fit 32 bits");
  }
  return static_cast<int32_t>(value);
}

// By hand, not through pybind11's list caster: these run for every row of every step.
class FastSequence {
 public:
  explicit FastSequence(py::handle object)
      : items_(py::reinterpret_steal<py::object>(
            PySequence_Fast(object.ptr(), "expected a sequence"))) {
    if (!items_) throw py::error_already_set();
  }
  size_t size() const { return static_cast<size_t>(PySequence_Fast_GET_SIZE(items_.ptr())); }
  PyObject* operator[](size_t i) const {
    return PySequence_Fast_GET_ITEM(items_.ptr(), static_cast<Py_ssize_t>(i));
  }

 private:
  py::object items_;
};

template <typename T, T (*Convert)(PyObject*)>
std::vector<T> ReadColumn(py::handle object) {
  const FastSequence items(object);
  std::vector<T> column(items.size());
  for (size_t i = 0; i < column.size(); ++i) column[i] = Convert(items[i]);
  return column;
}

std::vector<Row> ReadRows(py::handle object) {
  const FastSequence items(object);
  std::vector<Row> rows(items.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    PyObject* item = items[i];
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 4) {
      throw py::type_error("rows: expected (sequence_id, start, num_tokens, samples)");
    }
    const int samples = PyObject_IsTrue(PyTuple_GET_ITEM(item, 3));
    if (samples < 0) throw py::error_already_set();
    rows[i] = {AsInt64(PyTuple_GET_ITEM(item, 0)), AsInt64(PyTuple_GET_ITEM(item, 1)),
               AsInt64(PyTuple_GET_ITEM(item, 2)), samples != 0};
  }
  return rows;
}

// A writable, contiguous buffer, held while in scope.
class WritableBytes {
 public:
  explicit WritableBytes(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) {
      throw py::error_already_set();
    }
  }
  ~WritableBytes() { PyBuffer_Release(&view_); }
  WritableBytes(const WritableBytes&) = delete;
  WritableBytes& operator=(const WritableBytes&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

SlotLayout ReadLayout(size_t max_tokens, size_t max_rows, size_t max_blocks_per_row,
                      size_t slot_bytes, const py::dict& offsets) {
  const auto at = [&offsets](const char* name) { return offsets[name].cast<size_t>(); };
  return {max_tokens,       max_rows,          max_blocks_per_row, slot_bytes,
          at("token_ids"),  at("positions"),   at("slots"),        at("row_starts"),
          at("kv_lengths"), at("logits_rows"), at("block_tables")};
}

void RegisterErrors(py::module_& m) {
  py::register_exception<OutOfBlocks>(m, "OutOfBlocks");
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const BrokenInvariant& error) {
      py::set_error(PyExc_AssertionError, error.what());
    } catch (const UnknownSequence& error) {
      py::set_error(PyExc_KeyError, error.what());
    }
  });
}

void BindPool(py::module_& m) {
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(m, "BlockPool")
      .def(py::init<int32_t>(), py::arg("num_blocks"))
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def("allocate", &BlockPool::Allocate, py::arg("count"))
      .def("retain", &BlockPool::Retain, py::arg("block"))
      .def("release", &BlockPool::Release, py::arg("block"))
      .def("references", &BlockPool::References, py::arg("block"))
      .def("free_blocks", &BlockPool::FreeBlocks)
      .def("check", &BlockPool::Check);
}

void BindKvCache(py::module_& m) {
  py::class_<KvCache, std::shared_ptr<KvCache>>(m, "KvCache")
      .def(py::init<std::shared_ptr<BlockPool>, int32_t>(), py::arg("pool"), py::arg("block_size"))
      .def_property_readonly("num_blocks", &KvCache::num_blocks)
      .def_property_readonly("block_size", &KvCache::block_size)
      .def_property_readonly("num_free_blocks", &KvCache::num_free_blocks)
      .def("reserve", &KvCache::Reserve, py::arg("sequence_id"), py::arg("num_tokens"))
      .def(
          "reserve_rows",
          [](KvCache& self, const py::object& rows) { return self.ReserveRows(ReadRows(rows)); },
          py::arg("rows"))
      .def("release", &KvCache::Release, py::arg("sequence_id"))
      .def("table", &KvCache::Table, py::arg("sequence_id"))
      .def("sequence_ids", &KvCache::SequenceIds)
      .def("check", &KvCache::Check);
}

void BindStepWriter(py::module_& m) {
  py::class_<StepWriter>(m, "StepWriter")
      .def(py::init([](std::shared_ptr<KvCache> kv_cache, size_t max_tokens, size_t max_rows,
                       size_t max_blocks_per_row, size_t slot_bytes, const py::dict& offsets) {
             return StepWriter(
                 std::move(kv_cache),
                 ReadLayout(max_tokens, max_rows, max_blocks_per_row, slot_bytes, offsets));
           }),
           py::arg("kv_cache"), py::kw_only(), py::arg("max_tokens"), py::arg("max_rows"),
           py::arg("max_blocks_per_row"), py::arg("slot_bytes"), py::arg("offsets"))
      .def(
          "open",
          [](StepWriter& self, int64_t sequence_id, const py::object& token_ids) {
            self.Open(sequence_id, ReadColumn<int32_t, AsInt32>(token_ids));
          },
          py::arg("sequence_id"), py::arg("token_ids"))
      .def(
          "append",
          [](StepWriter& self, const py::object& sequence_ids, const py::object& token_ids) {
            self.Append(ReadColumn<int64_t, AsInt64>(sequence_ids),
                        ReadColumn<int32_t, AsInt32>(token_ids));
          },
          py::arg("sequence_ids"), py::arg("token_ids"))
      .def("close", &StepWriter::Close, py::arg("sequence_id"))
      .def("token_ids", &StepWriter::TokenIds, py::arg("sequence_id"))
      .def("sequence_ids", &StepWriter::SequenceIds)
      .def(
          "write",
          [](StepWriter& self, const py::object& slot, uint64_t step_id, const py::object& rows) {
            const WritableBytes bytes(slot);
            self.Write(bytes.data(), bytes.size(), step_id, ReadRows(rows));
          },
          py::arg("slot"), py::arg("step_id"), py::arg("rows"));
}

}  // namespace
}  // namespace triptych

PYBIND11_MODULE(_core, m) {
  m.doc() = "C++ twins of triptych.engine_core's hot paths.";
  triptych::RegisterErrors(m);
  triptych::BindPool(m);
  triptych::BindKvCache(m);
  triptych::BindStepWriter(m);
}
