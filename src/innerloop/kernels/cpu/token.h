// One token: a decode step reads the memory once, writes it once, and needs no chunk.
#pragma once

#include "chunk.h"

namespace innerloop::INNERLOOP_ISA {

// asked += k S and found += q S, four rows of S [K, V] at a time.
template <class T>
static void ask(const T* __restrict state, int64_t K, int64_t V, const T* __restrict k, const T* __restrict q,
                T* __restrict asked, T* __restrict found) {
  int64_t row = 0;
  for (; row + 4 <= K; row += 4) {
    const T *s = state + row * V, *x = k + row, *y = q + row;
    const T *s1 = s + V, *s2 = s1 + V, *s3 = s2 + V;
    for (int64_t i = 0; i < V; ++i) {
      asked[i] += (x[0] * s[i] + x[1] * s1[i]) + (x[2] * s2[i] + x[3] * s3[i]);
      found[i] += (y[0] * s[i] + y[1] * s1[i]) + (y[2] * s2[i] + y[3] * s3[i]);
    }
  }
  for (; row < K; ++row)
    for (int64_t i = 0; i < V; ++i) {
      asked[i] += k[row] * state[row * V + i];
      found[i] += q[row] * state[row * V + i];
    }
}

// after = p before + k u^T; no before: zeros.
template <class T>
static void put(const T* __restrict before, int64_t K, int64_t V, T carry, const T* __restrict k,
                const T* __restrict update, T* __restrict after) {
  for (int64_t row = 0; row < K; ++row) {
    const T key = k[row];
    T* to = after + row * V;
    if (before)
      for (int64_t i = 0; i < V; ++i) to[i] = carry * before[row * V + i] + key * update[i];
    else
      for (int64_t i = 0; i < V; ++i) to[i] = key * update[i];
  }
}

template <class T>
static void token(Chunk<T>& x, const Frame<T>& f) {
  const int64_t at = f.begin;
  T *q = x.qk, *k = x.keys(f, 1), *update = x.v, *found = x.read, *asked = x.read + f.step_v;
  read_token(x, f, at, 0, q, k, true);
  read_rates(x, f, at, 1);
  read_decays(x, f, at, 1);
  read_values(f, at, 1, update);
  for (int64_t i = 0; i < f.wide_v; ++i) asked[i] = found[i] = 0;
  const T* state = f.call.state ? static_cast<const T*>(f.call.state) + f.matrix() : nullptr;
  if (state) ask(state, f.K, f.V, k, q, asked, found);
  if (f.call.corrects)
    for (int64_t i = 0; i < f.V; ++i) update[i] = x.rate[0] * update[i] + x.minus[0] * asked[i];
  const T own = T(f.call.scale) * dot(q, k, f.wide_k), past = x.scaled_carry[0];
  for (int64_t i = 0; i < f.V; ++i) found[i] = past * found[i] + own * update[i];
  write_row(found, f.V, f.call.out, f.place(at) * f.V, f.call.v.element);
  if (f.call.final) put(state, f.K, f.V, x.carry[0], k, update, static_cast<T*>(f.call.final) + f.matrix());
}

}  // namespace innerloop::INNERLOOP_ISA
