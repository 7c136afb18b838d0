// One token of a memory that fades by channel: a decode step needs no chunk.
#pragma once

#include "channel_decay.h"

namespace innerloop::INNERLOOP_ISA::channel {

// asked += x S and found += q S, four rows of S [K, V] at a time.
template <class T>
static void ask(const T* __restrict state, int64_t K, int64_t V, const T* __restrict x, const T* __restrict q,
                T* __restrict asked, T* __restrict found) {
  int64_t row = 0;
  for (; row + 4 <= K; row += 4) {
    const T *s = state + row * V, *a = x + row, *b = q + row;
    const T *s1 = s + V, *s2 = s1 + V, *s3 = s2 + V;
    for (int64_t i = 0; i < V; ++i) {
      asked[i] += (a[0] * s[i] + a[1] * s1[i]) + (a[2] * s2[i] + a[3] * s3[i]);
      found[i] += (b[0] * s[i] + b[1] * s1[i]) + (b[2] * s2[i] + b[3] * s3[i]);
    }
  }
  for (; row < K; ++row)
    for (int64_t i = 0; i < V; ++i) {
      asked[i] += x[row] * state[row * V + i];
      found[i] += q[row] * state[row * V + i];
    }
}

// after = keep before + y u^T + z v^T; no before: zeros, no z: nothing.
template <class T>
static void put(const T* __restrict before, const T* keep, int64_t K, int64_t V, const T* y, const T* __restrict update,
                const T* z, const T* __restrict value, T* __restrict after) {
  for (int64_t row = 0; row < K; ++row) {
    T* to = after + row * V;
    const T written = y[row];
    if (before)
      for (int64_t i = 0; i < V; ++i) to[i] = keep[row] * before[row * V + i] + written * update[i];
    else
      for (int64_t i = 0; i < V; ++i) to[i] = written * update[i];
    for (int64_t i = 0; z && i < V; ++i) to[i] += z[row] * value[i];
  }
}

// `writes`: [2 tall, V]; `read`: [2, V].
template <class T>
static void token(Chunk<T>& c, const Frame<T>& f, T* writes, T* read) {
  const ChannelCall& call = f.call;
  c.begin(f, 1, true, false);
  read_block(c, f, f.begin, 0, c.rows);
  read_values(c, f, f.begin, writes, read);
  const T *y = c.columns, *z = f.writes == 2 ? c.written(f, 1, 0) : nullptr;
  const T* value = writes + (f.writes - 1) * c.tall * f.step_v;
  T *q = c.rows, *x = q + (f.reads - 1) * f.step_k, *found = read, *asked = read + f.step_v;
  const T own = dot(q, y, f.wide_k), added = z ? dot(q, z, f.wide_k) : T(0);
  if (call.kind == kDelta || call.kind == kDecoupled) multiply(x, x, c.keep, f.wide_k);
  multiply(q, q, c.keep, f.wide_k);
  fill(read, T(0), 2 * f.step_v);
  const T* state = call.state ? static_cast<const T*>(call.state) + f.matrix() : nullptr;
  if (state) ask(state, f.K, f.V, x, q, asked, found);
  for (int64_t i = 0; i < f.V && f.reads == 2; ++i) writes[i] = (z ? T(0) : writes[i]) - asked[i];
  for (int64_t i = 0; i < f.V; ++i) found[i] = T(call.scale) * (found[i] + own * writes[i] + added * value[i]);
  write_row(found, f.V, call.out, f.place(f.begin) * f.V, call.v.element);
  if (call.final)
    put(state, c.keep, f.K, f.V, y, writes, z, value, static_cast<T*>(call.final) + f.matrix());
}

}  // namespace innerloop::INNERLOOP_ISA::channel
