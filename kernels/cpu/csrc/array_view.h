// Arrays from Python as they are: checked views, never converted copies.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

namespace triptych {

// Throws TypeError or ValueError naming what is wrong.
template <typename T>
void check_view(const pybind11::array& array, const char* name, pybind11::ssize_t dimensions) {
  namespace py = pybind11;
  if (!py::isinstance<py::array_t<T>>(array))
    throw py::type_error(std::string(name) + " must have dtype " +
                         std::string(py::str(py::dtype::of<T>())) + ", not " +
                         std::string(py::str(array.dtype())));
  if (array.ndim() != dimensions)
    throw py::value_error(std::string(name) + " must have " + std::to_string(dimensions) +
                          " dimensions, not " + std::to_string(array.ndim()));
  constexpr int kRequired =
      py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  if ((array.flags() & kRequired) != kRequired)
    throw py::value_error(std::string(name) + " must be C-contiguous and aligned");
}

template <typename T>
const T* view(const pybind11::array& array, const char* name, pybind11::ssize_t dimensions) {
  check_view<T>(array, name, dimensions);
  return static_cast<const T*>(array.data());
}

// The same for an array that is written to.
template <typename T>
T* writable_view(pybind11::array& array, const char* name, pybind11::ssize_t dimensions) {
  check_view<T>(array, name, dimensions);
  return static_cast<T*>(array.mutable_data());
}

template <typename T>
const T* column(const pybind11::array& array, const char* name, pybind11::ssize_t length) {
  const T* data = view<T>(array, name, 1);
  if (array.shape(0) != length)
    throw pybind11::value_error(std::string(name) + " has " + std::to_string(array.shape(0)) +
                                " entries, expected " + std::to_string(length));
  return data;
}

}  // namespace triptych
