// Memory that ends at a page nobody may touch, and tensors of any element and layout in it.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

#include "convert.h"

namespace emulate {

using innerloop::Strided;

// Filled with ones in every bit, which read as NaN; a read or write behind its end stops the program.
class Block {
  static constexpr int64_t kPage = 4096;
  static constexpr unsigned char kFill = 0xff;
  unsigned char* from = nullptr;
  int64_t pages = 0, size = 0;

 public:
  Block() = default;
  explicit Block(int64_t bytes) : pages((bytes + kPage - 1) / kPage * kPage), size(bytes) {
    void* found = mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) std::abort();
    from = static_cast<unsigned char*>(found);
    mprotect(from + pages, kPage, PROT_NONE);
    clear();
  }
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Block() {
    if (from) munmap(from, pages + kPage);
  }
  void swap(Block& other) {
    std::swap(from, other.from), std::swap(pages, other.pages), std::swap(size, other.size);
  }
  void clear() { std::memset(from, kFill, pages); }
  char* data() const { return from ? reinterpret_cast<char*>(from + pages - size) : nullptr; }
  int64_t bytes() const { return size; }
  // Whether what lies in front of the data is as it was.
  bool intact() const {
    for (int64_t i = 0; i < pages - size; ++i)
      if (from[i] != kFill) return false;
    return true;
  }
};

inline int64_t size_of(int64_t element) {
  return element == innerloop::kDouble ? 8 : element == innerloop::kFloat ? 4 : 2;
}

inline void put(void* data, int64_t element, int64_t at, double x) {
  using namespace innerloop::plain;
  switch (element) {
    case innerloop::kFloat: narrow(x, static_cast<float*>(data) + at); break;
    case innerloop::kDouble: narrow(x, static_cast<double*>(data) + at); break;
    case innerloop::kBrain: narrow(x, static_cast<Brain*>(data) + at); break;
    default: narrow(x, static_cast<Half*>(data) + at); break;
  }
}
inline double get(const void* data, int64_t element, int64_t at) {
  return innerloop::plain::read_one({const_cast<void*>(data), 0, 0, 0, 0, element}, at);
}

struct Tensor {
  Block block;
  Strided view{};
};

enum class Layout { tokens, heads, apart, expanded };  // contiguous, heads first, columns two apart, one number a row

// [rows, length, heads, width], each element drawn in that order; width 0: no last axis.
inline Tensor tensor(int64_t rows, int64_t length, int64_t heads, int64_t width, int64_t element, Layout layout,
                     const std::function<double()>& draw) {
  const int64_t column = width == 0 || layout == Layout::expanded ? 0 : layout == Layout::apart ? 2 : 1;
  const int64_t columns = width ? width : 1, cell = column ? columns * column : 1;
  const bool heads_first = layout == Layout::heads;
  Tensor x;
  x.block = Block(rows * length * heads * cell * size_of(element));
  x.view = {x.block.data(), length * heads * cell, (heads_first ? 1 : heads) * cell, (heads_first ? length : 1) * cell,
            column, element};
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t t = 0; t < length; ++t)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < (column ? columns : 1); ++i)
          put(x.view.data, element, b * x.view.row + t * x.view.token + h * x.view.head + i * column, draw());
  return x;
}

// A contiguous one without strides.
inline Block numbers(int64_t count, int64_t element, const std::function<double()>& draw) {
  Block x(count * size_of(element));
  for (int64_t i = 0; i < count; ++i) put(x.data(), element, i, draw());
  return x;
}

}  // namespace emulate
