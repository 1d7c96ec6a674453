#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace triptych {

Buffer::Buffer(size_t bytes) {
  const size_t size = (bytes + 63) / 64 * 64;
  if (size == 0) return;
  data_ = std::aligned_alloc(64, size);
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, size);
}

Buffer::~Buffer() { std::free(data_); }

Buffer::Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

Pages::Pages(size_t bytes) : size_(bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(pages);
}

Pages::~Pages() { munmap(data_, size_); }

}  // namespace triptych
