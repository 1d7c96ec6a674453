#include "arguments.h"

#include <cstring>

#include "errors.h"

namespace py = pybind11;

namespace triptych {
namespace {

// False where the object has no buffer of the kind; then nothing is read.
bool ReadTokenBuffer(PyObject* object, std::vector<int32_t>* tokens) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
    PyErr_Clear();
    return false;
  }
  const char kind = view.format != nullptr && view.format[1] == '\0' ? view.format[0] : '\0';
  const bool integers = view.ndim == 1 && std::strchr("ilq", kind) != nullptr && kind != '\0';
  const size_t count = integers ? static_cast<size_t>(view.len / view.itemsize) : 0;
  try {
    if (integers && view.itemsize == sizeof(int32_t)) {
      const auto* from = static_cast<const int32_t*>(view.buf);
      tokens->assign(from, from + count);
    } else if (integers) {
      const auto* from = static_cast<const int64_t*>(view.buf);
      tokens->resize(count);
      for (size_t i = 0; i < count; ++i) (*tokens)[i] = Narrow(from[i]);
    }
  } catch (...) {
    PyBuffer_Release(&view);
    throw;
  }
  PyBuffer_Release(&view);
  return integers;
}

}  // namespace

Bytes::Bytes(py::handle object, int flags) {
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
}

std::vector<int32_t> ReadTokens(py::handle object) {
  std::vector<int32_t> tokens;
  const bool plain = PyList_CheckExact(object.ptr()) || PyTuple_CheckExact(object.ptr());
  if (!plain && PyObject_CheckBuffer(object.ptr()) && ReadTokenBuffer(object.ptr(), &tokens)) {
    return tokens;
  }
  const auto items = py::reinterpret_steal<py::object>(
      PySequence_Fast(object.ptr(), "token_ids: expected a sequence"));
  if (!items) throw py::error_already_set();
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
  tokens.resize(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    const long long value = PyLong_AsLongLong(item);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    tokens[i] = Narrow(value);
  }
  return tokens;
}

std::string_view ReadBytes(py::handle object) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(object.ptr(), &data, &size) != 0) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

template <typename T>
std::pair<py::object, T*> NewArray(size_t count) {
  static const char typecode = sizeof(T) == 8 ? 'q' : sizeof(T) == 4 ? 'i' : 'B';
  // An array of one item, repeated: the shortest way to one of a size.
  static PyObject* const one = py::object(py::module_::import("array").attr("array")(
                                              py::str(&typecode, 1), py::make_tuple(0)))
                                   .release()
                                   .ptr();
  auto array =
      py::reinterpret_steal<py::object>(PySequence_Repeat(one, static_cast<Py_ssize_t>(count)));
  if (!array) throw py::error_already_set();
  const Bytes items(array, PyBUF_WRITABLE);
  return {std::move(array), reinterpret_cast<T*>(items.data())};
}

template std::pair<py::object, int64_t*> NewArray(size_t count);
template std::pair<py::object, int32_t*> NewArray(size_t count);
template std::pair<py::object, uint8_t*> NewArray(size_t count);

}  // namespace triptych
