// One token of a memory that fades by channel: a decode step needs no chunk.
#pragma once

#include "channel_decay.h"
#include "token.h"

namespace innerloop::INNERLOOP_ISA::channel {

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
  if (state) ask<true>(state, f.K, f.V, f.far(), x, q, asked, found);
  for (int64_t i = 0; i < f.V && f.reads == 2; ++i) writes[i] = (z ? T(0) : writes[i]) - asked[i];
  for (int64_t i = 0; i < f.V; ++i) found[i] = T(call.scale) * (found[i] + own * writes[i] + added * value[i]);
  write_row(found, f.V, call.out, f.place(f.begin) * f.V, call.v.element);
  if (call.final)
    put(state, c.keep, f.K, f.K, f.V, y, writes, z, value, static_cast<T*>(call.final) + f.matrix());
}

}  // namespace innerloop::INNERLOOP_ISA::channel
