// Python arguments and results as C++ ones, without an object for each item where a buffer allows.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace triptych {

// A contiguous buffer, held while in scope.
class Bytes {
 public:
  Bytes(pybind11::handle object, int flags);
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_{};
};

// Token ids in a one-dimensional buffer of 32 or 64-bit integers, or in any sequence of ints.
// Throws std::overflow_error for what does not fit 32 bits.
std::vector<int32_t> ReadTokens(pybind11::handle object);

// The bytes of a `bytes` object, while it lives. Throws TypeError for anything else.
std::string_view ReadBytes(pybind11::handle object);

// A new array.array of `count` items, and where they are while it lives. T: int64_t (typecode q),
// int32_t (i) or uint8_t (B).
template <typename T>
std::pair<pybind11::object, T*> NewArray(size_t count);

template <typename T>
pybind11::object MakeArray(const std::vector<T>& column) {
  auto [array, items] = NewArray<T>(column.size());
  std::copy(column.begin(), column.end(), items);
  return std::move(array);
}

}  // namespace triptych
