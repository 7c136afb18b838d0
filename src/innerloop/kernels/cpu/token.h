// One token: a decode step reads the memory once, writes it once, and needs no chunk.
#pragma once

#include "chunk.h"

namespace innerloop::INNERLOOP_ISA {

// asked += k S and found += q S for some rows of N vectors of columns, or of one column for N = 0.
template <class T, int N>
INNERLOOP_INLINE void ask(const T* state, int64_t rows, int64_t V, const T* k, const T* q, T* asked, T* found) {
  if constexpr (N == 0) {
    for (int64_t row = 0; row < rows; ++row) *asked += k[row] * state[row * V], *found += q[row] * state[row * V];
  } else {
    Vec<T> a[N], b[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) a[j] = load(asked + j * kLanes<T>), b[j] = load(found + j * kLanes<T>);
    for (int64_t row = 0; row < rows; ++row) {
      const Vec<T> x = splat(k[row]), y = splat(q[row]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const Vec<T> s = load(state + row * V + j * kLanes<T>);
        a[j] += x * s;
        b[j] += y * s;
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(asked + j * kLanes<T>, a[j]), store(found + j * kLanes<T>, b[j]);
  }
}

// Some rows at a time, so that the memory is read in the order in which it lies.
template <class T>
static void ask_all(const Frame<T>& f, const T* state, const T* k, const T* q, T* asked, T* found) {
  constexpr int64_t kSome = 16;
  for (int64_t i = 0; i < f.wide_v; ++i) asked[i] = found[i] = 0;
  for (int64_t row = 0; row < f.K; row += kSome) {
    const T* s = state + row * f.V;
    const int64_t rows = smaller(kSome, f.K - row);
    int64_t i = 0;
    for (; i + 4 * kLanes<T> <= f.V; i += 4 * kLanes<T>) ask<T, 4>(s + i, rows, f.V, k + row, q + row, asked + i, found + i);
    for (; i + kLanes<T> <= f.V; i += kLanes<T>) ask<T, 1>(s + i, rows, f.V, k + row, q + row, asked + i, found + i);
    for (; i < f.V; ++i) ask<T, 0>(s + i, rows, f.V, k + row, q + row, asked + i, found + i);
  }
}

// after = p before + k u^T; no before: zeros. Both may be the same memory.
template <class T>
static void put(const Frame<T>& f, const T* before, T carry, const T* k, const T* update, T* after) {
  for (int64_t row = 0; row < f.K; ++row) {
    const T key = k[row];
    T* to = after + row * f.V;
    int64_t i = 0;
    if (before) {
      const T* from = before + row * f.V;
      for (; i + kLanes<T> <= f.V; i += kLanes<T>) store(to + i, carry * load(from + i) + key * load(update + i));
      for (; i < f.V; ++i) to[i] = carry * from[i] + key * update[i];
    } else {
      for (; i < f.V; ++i) to[i] = key * update[i];
    }
  }
}

template <class T>
static void token(Chunk<T>& x, const Frame<T>& f) {
  const int64_t at = f.begin;
  T *q = x.qk, *k = x.keys(f, 1);
  read_token(x, f, at, 0, q, k, true);
  read_rates(x, f, at, 1);
  read_decays(x, f, at, 1);
  read_values(f, at, 1, x.v);
  const T* before = f.call.state ? static_cast<const T*>(f.call.state) + f.matrix() : nullptr;
  T* after = f.call.final ? static_cast<T*>(f.call.final) + f.matrix() : nullptr;
  const T own = T(f.call.scale) * dot(q, k, f.wide_k);
  T *update = x.v, *found = x.read, *asked = x.read + f.step_v;
  if (before) ask_all(f, before, k, q, asked, found);
  for (int64_t i = 0; i < f.V; ++i) {
    if (f.call.corrects) update[i] = x.rate[0] * update[i] + (before ? x.minus[0] * asked[i] : T(0));
    found[i] = (before ? x.scaled_carry[0] * found[i] : T(0)) + own * update[i];
  }
  if (after) put(f, before, x.carry[0], k, update, after);
  write_row(found, f.V, f.call.out, f.place(at) * f.V, f.call.v.element);
}

}  // namespace innerloop::INNERLOOP_ISA
