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
        Vec<T> s = load(state + row * V + j * kLanes<T>);
        INNERLOOP_KEEP(s);  // else both products read it from memory
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

// after = p before + k u^T for some rows of N vectors of columns, or of one column for N = 0; both may be one memory.
template <class T, int N>
INNERLOOP_INLINE void put(const T* before, int64_t rows, int64_t V, T carry, const T* k, const T* update, T* after) {
  if constexpr (N == 0) {
    const T u = *update;
    for (int64_t row = 0; row < rows; ++row) after[row * V] = carry * before[row * V] + k[row] * u;
  } else {
    const Vec<T> p = splat(carry);
    Vec<T> u[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) u[j] = load(update + j * kLanes<T>);
    for (int64_t row = 0; row < rows; ++row) {
      const Vec<T> x = splat(k[row]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const int64_t at = row * V + j * kLanes<T>;
        store(after + at, p * load(before + at) + x * u[j]);
      }
    }
  }
}

// No before: zeros.
template <class T>
static void put_all(const Frame<T>& f, const T* before, T carry, const T* k, const T* update, T* after) {
  constexpr int64_t kSome = 16;
  const int64_t V = f.V;
  if (!before) {
    for (int64_t row = 0; row < f.K; ++row)
      for (int64_t i = 0; i < V; ++i) after[row * V + i] = k[row] * update[i];
    return;
  }
  for (int64_t row = 0; row < f.K; row += kSome) {
    const T* from = before + row * V;
    T* to = after + row * V;
    const int64_t rows = smaller(kSome, f.K - row);
    int64_t i = 0;
    for (; i + 4 * kLanes<T> <= V; i += 4 * kLanes<T>) put<T, 4>(from + i, rows, V, carry, k + row, update + i, to + i);
    for (; i + kLanes<T> <= V; i += kLanes<T>) put<T, 1>(from + i, rows, V, carry, k + row, update + i, to + i);
    for (; i < V; ++i) put<T, 0>(from + i, rows, V, carry, k + row, update + i, to + i);
  }
}

template <class T>
static void token(Chunk<T>& x, const Frame<T>& f) {
  const int64_t at = f.begin;
  T *q = x.qk, *k = x.keys(f, 1);
  read_token(x, f, at, 0, q, k, true);
  read_rates(x, f, at, 1);
  read_decays(x, f, at, 1);
  read_values(x.turns, f, f.call.v, at, 1, x.v);
  const T* before = f.call.state ? static_cast<const T*>(f.call.state) + f.matrix() : nullptr;
  T* after = f.call.final ? static_cast<T*>(f.call.final) + f.matrix() : nullptr;
  const T own = T(f.call.scale) * dot(q, k, f.wide_k);
  T *update = x.v, *found = x.read, *asked = x.read + f.step_v;
  if (before) ask_all(f, before, k, q, asked, found);
  const Vec<T> rate = splat(f.call.corrects ? x.rate[0] : T(1)), minus = splat(f.call.corrects ? x.minus[0] : T(0));
  const Vec<T> past = splat(x.scaled_carry[0]);
  for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) {
    Vec<T> u = load(update + i) * rate;
    if (before) u += load(asked + i) * minus;
    store(update + i, u);
    store(found + i, before ? load(found + i) * past + u * own : u * own);
  }
  if (after) put_all(f, before, x.carry[0], k, update, after);
  write_row(found, f.V, f.call.out, f.place(at) * f.V, f.call.v.element);
}

}  // namespace innerloop::INNERLOOP_ISA
