// One token: a decode step reads the memory once, writes it once, and needs no chunk.
#pragma once

#include "chunk.h"

namespace innerloop::INNERLOOP_ISA {

// Ask for the four rows that lie `rows` later than this part of a row and of its three neighbours.
template <class T>
INNERLOOP_INLINE void ask_later(const T* row, int64_t V, int64_t rows) {
  for (int64_t n = rows; n < rows + 4; ++n) __builtin_prefetch(row + n * V, 0, 3);
}

// found += q S and, if Both, asked += x S. Rows are read to their ends in the order in which they lie, four together: of
// parts of rows, which no prefetcher of the processor's follows, a step waited four fifths of its time. Later ones are
// asked for, beyond the last those of the next memory: of memories in a cache a line at a time, just before it is needed;
// of those `far` away four rows at once, which took two thirds of that time at 24 MiB, and a quarter more at 12. The sums
// are in the first cache.
template <bool Both, class T>
static void ask(const T* state, int64_t K, int64_t V, bool far, const T* x, const T* q, T* asked, T* found) {
  constexpr int64_t L = kLanes<T>, kLine = 64 / sizeof(T);
  int64_t row = 0;
  for (; row + 4 <= K; row += 4) {
    const T *s = state + row * V, *s1 = s + V, *s2 = s1 + V, *s3 = s2 + V, *b = q + row, *a = Both ? x + row : b;
    const Vec<T> a0 = splat(a[0]), a1 = splat(a[1]), a2 = splat(a[2]), a3 = splat(a[3]);
    const Vec<T> b0 = splat(b[0]), b1 = splat(b[1]), b2 = splat(b[2]), b3 = splat(b[3]);
    if (far) ask_block(s + 16 * V, 4 * V);
    int64_t i = 0;
#pragma GCC unroll 2
    for (; i + L <= V; i += L) {
      if (!far && i % kLine == 0) ask_later(s + i, V, 8);
      const Vec<T> c0 = load(s + i), c1 = load(s1 + i), c2 = load(s2 + i), c3 = load(s3 + i);
      if constexpr (Both) store(asked + i, (load(asked + i) + a0 * c0 + a1 * c1) + (a2 * c2 + a3 * c3));
      store(found + i, (load(found + i) + b0 * c0 + b1 * c1) + (b2 * c2 + b3 * c3));
    }
    for (; i < V; ++i) {
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

// A row of `put`.
template <bool Two, class T>
static void put_row(const T* from, T kept, int64_t V, T written, const T* update, T added, const T* value, T* to) {
  constexpr int64_t L = kLanes<T>;
  const Vec<T> keep = splat(kept), y = splat(written), z = splat(added);
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + L <= V; i += L) {
    Vec<T> next = y * load(update + i);
    if (from) next += keep * load(from + i);
    if constexpr (Two) next += z * load(value + i);
    store(to + i, next);
  }
  for (; i < V; ++i) {
    T next = written * update[i];
    if (from) next += kept * from[i];
    if constexpr (Two) next += added * value[i];
    to[i] = next;
  }
}

// after = keep before + y u^T + z v^T, with one number to keep or one a row; no before: zeros, no z: nothing. Both memories
// may be one.
template <class T>
static void put(const T* before, const T* keep, int64_t keeps, int64_t K, int64_t V, const T* y, const T* update,
                const T* z, const T* value, T* after) {
  for (int64_t row = 0; row < K; ++row) {
    const T *from = before ? before + row * V : nullptr, kept = keep[keeps == 1 ? 0 : row];
    if (z) put_row<true>(from, kept, V, y[row], update, z[row], value, after + row * V);
    else put_row<false>(from, kept, V, y[row], update, T(0), value, after + row * V);
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
  if (before) ask<true>(before, f.K, f.V, f.far(), k, q, asked, found);
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
