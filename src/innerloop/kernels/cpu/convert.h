// Rows of any element type and stride, to and from the padded rows that products take.
#pragma once

#include "call.h"
#include "vector.h"

namespace innerloop::INNERLOOP_ISA {

struct Brain {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

INNERLOOP_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
INNERLOOP_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

INNERLOOP_INLINE double widen(double x) { return x; }
INNERLOOP_INLINE float widen(float x) { return x; }
INNERLOOP_INLINE float widen(Brain x) { return from_bits(uint32_t(x.bits) << 16); }
// A small half is a denormal, which would read as zero here if it went through float's own denormals.
INNERLOOP_INLINE float widen(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  const float small = float(int32_t(rest)) * 5.9604644775390625e-8f;
  const uint32_t large = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
  return from_bits(sign | (rest < 0x400 ? to_bits(small) : large));
}

INNERLOOP_INLINE void narrow(double x, double* to) { *to = x; }
INNERLOOP_INLINE void narrow(float x, float* to) { *to = x; }
INNERLOOP_INLINE void narrow(double x, float* to) { *to = float(x); }
INNERLOOP_INLINE void narrow(float x, double* to) { *to = x; }
INNERLOOP_INLINE void narrow(float x, Brain* to) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
INNERLOOP_INLINE void narrow(float x, Half* to) {
  const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  const uint32_t small = to_bits(from_bits(size) + 0.5f) - 0x3f000000u;  // the sum rounds to half's smallest step
  const uint32_t normal = (size - 0x38000000u + 0xfff + ((size >> 13) & 1)) >> 13;
  const uint32_t huge = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  to->bits = uint16_t(sign | (size >= 0x47800000 ? huge : size < 0x38800000 ? small : normal));
}
template <class T>
INNERLOOP_INLINE void narrow(double x, T* to) {
  narrow(float(x), to);
}

template <class T, class E>
static void read(const E* from, int64_t step, int64_t n, T* to) {
  if (step == 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = T(widen(from[i]));
  } else if (step == 0) {  // an expanded number, as the gradient of a sum is
    const T x = T(widen(*from));
    for (int64_t i = 0; i < n; ++i) to[i] = x;
  } else
    for (int64_t i = 0; i < n; ++i) to[i] = T(widen(from[i * step]));
}

// Read n elements at `offset` into a row, and fill the row up with zeros to a multiple of the lanes.
template <class T>
static void read_row(const Strided& x, int64_t offset, int64_t n, T* to) {
  switch (x.element) {
    case kFloat: read(static_cast<const float*>(x.data) + offset, x.column, n, to); break;
    case kDouble: read(static_cast<const double*>(x.data) + offset, x.column, n, to); break;
    case kBrain: read(static_cast<const Brain*>(x.data) + offset, x.column, n, to); break;
    default: read(static_cast<const Half*>(x.data) + offset, x.column, n, to); break;
  }
  for (int64_t i = n; i < padded<T>(n); ++i) to[i] = 0;
}

// Ask for a row that will be read: rows lie a page apart, where no prefetcher of the processor's follows.
// Inline: GCC drops the call of a function that does nothing but ask.
INNERLOOP_INLINE void ask_row(const Strided& x, int64_t offset, int64_t n) {
  constexpr int64_t sizes[] = {4, 8, 2, 2};
  const int64_t size = sizes[x.element];
  if (!x.data || x.column != 1) return;
  const char* row = static_cast<const char*>(x.data) + offset * size;
  for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch(row + i, 0, 3);
}
template <class T>
INNERLOOP_INLINE void ask_block(const T* data, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(data + i, 0, 2);
}
constexpr int64_t kAhead = 8;  // tokens; many more would push each other out of the caches' sets

// A gate keeps its own precision until it is used.
INNERLOOP_INLINE double read_one(const Strided& x, int64_t offset) {
  switch (x.element) {
    case kFloat: return static_cast<const float*>(x.data)[offset];
    case kDouble: return static_cast<const double*>(x.data)[offset];
    case kBrain: return widen(static_cast<const Brain*>(x.data)[offset]);
    default: return widen(static_cast<const Half*>(x.data)[offset]);
  }
}

template <class T, class E>
static void write(const T* from, int64_t n, E* to) {
  for (int64_t i = 0; i < n; ++i) narrow(from[i], to + i);
}

template <class T>
static void write_row(const T* from, int64_t n, void* data, int64_t offset, int64_t element) {
  switch (element) {
    case kFloat: write(from, n, static_cast<float*>(data) + offset); break;
    case kDouble: write(from, n, static_cast<double*>(data) + offset); break;
    case kBrain: write(from, n, static_cast<Brain*>(data) + offset); break;
    default: write(from, n, static_cast<Half*>(data) + offset); break;
  }
}

}  // namespace innerloop::INNERLOOP_ISA
