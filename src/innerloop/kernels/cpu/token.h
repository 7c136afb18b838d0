// One token: a decode step reads the memory once, writes it once, and needs no chunk.
#pragma once

#include "chunk.h"

namespace innerloop::INNERLOOP_ISA {

// found += q S and, if Both, asked += x S. Rows are read to their ends in the order in which they lie, and later ones are
// asked for, beyond the last those of the next memory: of parts of rows, which no prefetcher of the processor's follows,
// a step waited four fifths of its time. The sums are in the first cache.
template <bool Both, class T>
static void ask(const T* __restrict state, int64_t K, int64_t V, const T* __restrict x, const T* __restrict q,
                T* __restrict asked, T* __restrict found) {
  constexpr int64_t kLater = 16;
  int64_t row = 0;
  for (; row + 4 <= K; row += 4) {
    const T *s = state + row * V, *a = x + row, *b = q + row;
    const T *s1 = s + V, *s2 = s1 + V, *s3 = s2 + V;
    ask_block(s + kLater * V, 4 * V);
    for (int64_t i = 0; i < V; ++i) {
      if constexpr (Both) asked[i] += (a[0] * s[i] + a[1] * s1[i]) + (a[2] * s2[i] + a[3] * s3[i]);
      found[i] += (b[0] * s[i] + b[1] * s1[i]) + (b[2] * s2[i] + b[3] * s3[i]);
    }
  }
  for (; row < K; ++row)
    for (int64_t i = 0; i < V; ++i) {
      if constexpr (Both) asked[i] += x[row] * state[row * V + i];
      found[i] += q[row] * state[row * V + i];
    }
}

// after = keep before + y u^T + z v^T, with one number to keep or one a row; no before: zeros, no z: nothing. Both memories
// may be one.
template <class T>
static void put(const T* before, const T* keep, int64_t keeps, int64_t K, int64_t V, const T* y,
                const T* __restrict update, const T* z, const T* __restrict value, T* after) {
  for (int64_t row = 0; row < K; ++row) {
    T* to = after + row * V;
    const T *from = before + row * V, kept = keep[keeps == 1 ? 0 : row], written = y[row], added = z ? z[row] : T(0);
    if (!before)
      for (int64_t i = 0; i < V; ++i) to[i] = written * update[i];
    else
#pragma GCC ivdep
      for (int64_t i = 0; i < V; ++i) to[i] = kept * from[i] + written * update[i];
    for (int64_t i = 0; z && i < V; ++i) to[i] += added * value[i];
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
  fill(found, T(0), 2 * f.step_v);
  if (before) ask<true>(before, f.K, f.V, k, q, asked, found);
  const Vec<T> rate = splat(f.call.corrects ? x.rate[0] : T(1)), minus = splat(f.call.corrects ? x.minus[0] : T(0));
  const Vec<T> past = splat(x.scaled_carry[0]);
  for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) {
    Vec<T> u = load(update + i) * rate;
    if (before) u += load(asked + i) * minus;
    store(update + i, u);
    store(found + i, before ? load(found + i) * past + u * own : u * own);
  }
  if (after) put<T>(before, x.carry, 1, f.K, f.V, k, update, nullptr, nullptr, after);
  write_row(found, f.V, f.call.out, f.place(at) * f.V, f.call.v.element);
}

}  // namespace innerloop::INNERLOOP_ISA
