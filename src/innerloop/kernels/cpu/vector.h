// Vectors of the compiler, as wide as the instruction set this file is compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && INNERLOOP_BYTES == 64
#define INNERLOOP_PAIR_UNIT 1
#include <immintrin.h>
#else
#define INNERLOOP_PAIR_UNIT 0
#endif

// Everything lives in a namespace of its instruction set, and nothing of the standard library's templates is used: the
// linker keeps one copy of an inline function, and must not keep that of a processor we are not on.
namespace innerloop::INNERLOOP_ISA {

constexpr int kBytes = INNERLOOP_BYTES;

// Two bfloat16 that follow each other along the depth of a product, the first one in the low half.
struct __attribute__((may_alias)) Pair {
  uint32_t bits;
};

template <class T>
struct Lanes;
template <>
struct Lanes<Pair> {
  typedef uint32_t type __attribute__((vector_size(kBytes)));
  typedef uint32_t loose __attribute__((vector_size(kBytes), aligned(4), may_alias));
};
template <>
struct Lanes<float> {
  typedef float type __attribute__((vector_size(kBytes)));
  typedef float loose __attribute__((vector_size(kBytes), aligned(4), may_alias));
  typedef int32_t bits __attribute__((vector_size(kBytes)));
};
template <>
struct Lanes<double> {
  typedef double type __attribute__((vector_size(kBytes)));
  typedef double loose __attribute__((vector_size(kBytes), aligned(8), may_alias));
  typedef int64_t bits __attribute__((vector_size(kBytes)));
};

template <class T>
using Vec = typename Lanes<T>::type;
template <class T>
constexpr int64_t kLanes = kBytes / sizeof(T);

#define INNERLOOP_INLINE static inline __attribute__((always_inline))

// Keep a vector that was read where it is, in a register.
#if defined(__x86_64__)
#define INNERLOOP_KEEP(x) asm("" : "+x"(x))
#elif defined(__aarch64__)
#define INNERLOOP_KEEP(x) asm("" : "+w"(x))
#else
#define INNERLOOP_KEEP(x) (void)(x)
#endif

template <class T>
INNERLOOP_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename Lanes<T>::loose*>(p);
}
template <class T>
INNERLOOP_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename Lanes<T>::loose*>(p) = x;
}
template <class T>
INNERLOOP_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}
INNERLOOP_INLINE Vec<Pair> splat(Pair x) {
  return x.bits - Vec<Pair>{};
}

// What products of T are summed in, and how many numbers of the depth a T holds.
template <class T>
struct Product {
  using Sum = T;
  static constexpr int64_t deep = 1;
};
template <>
struct Product<Pair> {
  using Sum = float;
  static constexpr int64_t deep = 2;
};
template <class T>
using Sum = typename Product<T>::Sum;

INNERLOOP_INLINE void multiply(Vec<float>& sum, Vec<float> a, Vec<float> b) { sum += a * b; }
INNERLOOP_INLINE void multiply(Vec<double>& sum, Vec<double> a, Vec<double> b) { sum += a * b; }
// Products of bfloat16 are exact in float, so that elsewhere it is what the processor's own instruction does.
INNERLOOP_INLINE void multiply(Vec<float>& sum, Vec<Pair> a, Vec<Pair> b) {
#if INNERLOOP_PAIR_UNIT
  sum = (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum += (Vec<float>)(a & 0xffff0000u) * (Vec<float>)(b & 0xffff0000u);
  sum += (Vec<float>)(a << 16) * (Vec<float>)(b << 16);
#endif
}

// The nearest bfloat16, of two as near the even one, in the high halves. A NaN's own bits may not go through the sum.
INNERLOOP_INLINE Vec<Pair> rounded(Vec<float> x) {
  const Vec<Pair> bits = (Vec<Pair>)x, up = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x == x ? up & 0xffff0000u : 0x7fc00000u - Vec<Pair>{};
}

template <class T>
INNERLOOP_INLINE T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
INNERLOOP_INLINE T larger(T a, T b) {
  return a < b ? b : a;
}

// e^x for x <= 0; below -87 it is 0, as every denormal is in these kernels.
INNERLOOP_INLINE Vec<float> exp_of(Vec<float> x) {
  using Bits = Lanes<float>::bits;
  const Vec<float> low = splat(-88.0f), magic = splat(12582912.0f);
  Vec<float> within = x < low ? low : x;
  Vec<float> shifted = within * 1.44269504088896341f + magic;  // its low bits are the rounded power of two
  Vec<float> power = shifted - magic;
  Vec<float> r = within - power * 0.693359375f;
  r = r + power * 2.12194440e-4f;
  Vec<float> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  Bits exponent = (((Bits)shifted - (Bits)magic) + 127) << 23;
  y = y * (Vec<float>)exponent;
  return x < splat(-87.0f) ? Vec<float>{} : y;
}
INNERLOOP_INLINE Vec<double> exp_of(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <class T>
INNERLOOP_INLINE T sum_of(Vec<T> x) {
  T total = 0;
  for (int i = 0; i < kLanes<T>; ++i) total += x[i];
  return total;
}

// The lanes before the given one; of the others, zeros.
template <class T>
INNERLOOP_INLINE Vec<T> lanes_before(Vec<T> x, int64_t lane) {
  Vec<T> place{};
  for (int i = 0; i < kLanes<T>; ++i) place[i] = T(i);
  return place < splat(T(lane)) ? x : Vec<T>{};
}

// Rows of padded width, a multiple of the lanes.
template <class T>
INNERLOOP_INLINE T dot(const T* a, const T* b, int64_t n) {
  Vec<T> total{};
  for (int64_t i = 0; i < n; i += kLanes<T>) total += load(a + i) * load(b + i);
  return sum_of<T>(total);
}
template <class T>
INNERLOOP_INLINE void fill(T* to, T value, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<T>) store(to + i, splat(value));
}

// How many elements lie between two rows of n: whole cache lines, an odd number of them, so that the rows of a column
// strip spread over all sets of the cache.
template <class T>
INNERLOOP_INLINE int64_t spread(int64_t n) {
  int64_t lines = (n * int64_t(sizeof(T)) + 63) / 64;
  return (lines | 1) * 64 / int64_t(sizeof(T));
}
template <class T>
INNERLOOP_INLINE int64_t padded(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

}  // namespace innerloop::INNERLOOP_ISA
