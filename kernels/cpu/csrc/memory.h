// Memory that a plan holds: aligned buffers, and pages that cost nothing until they are written.
#pragma once
#include <cstddef>
#include <cstdint>

namespace triptych {

// Zeroed bytes, 64-byte aligned, given back at the end. Throws std::bad_alloc.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  float* floats() const { return static_cast<float*>(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Anonymous pages of the system, zero until written. Ordinary ones: clearing a huge page in the
// middle of a step takes longer than its fewer translations save. Throws std::bad_alloc.
class Pages {
 public:
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_;
  size_t size_;
};

}  // namespace triptych
