// One token of the momentum rule: memory and momentum are read twice, the second time from the cache, and written once.
#pragma once

#include "momentum.h"
#include "token.h"

namespace innerloop::INNERLOOP_ISA {

// U' = eta U + k d^T and S' = keep S + U' for a row of K; each may lie where it lay.
template <class T>
static void put_pair(const T* memory, const T* momentum, int64_t V, T keep, T eta, T k, const T* write, T* after,
                     T* moved) {
  int64_t i = 0;
  for (; i + kLanes<T> <= V; i += kLanes<T>) {
    Vec<T> u = load(write + i) * k;
    if (momentum) u += load(momentum + i) * eta;
    Vec<T> s = u;
    if (memory) s += load(memory + i) * keep;
    store(moved + i, u);
    store(after + i, s);
  }
  for (; i < V; ++i) {
    const T u = write[i] * k + (momentum ? momentum[i] * eta : T(0));
    after[i] = u + (memory ? memory[i] * keep : T(0));
    moved[i] = u;
  }
}

template <class T>
static void momentum_token(Walk<T>& w, const Course<T>& f) {
  const MomentumCall& call = f.call;
  Stretch<T>& x = w.stretch;
  const int64_t K = f.K, V = f.V, begin = f.begin, place = f.matrix();
  read_course(x, f, begin, 1);
  read_values(x.turns, f, call.v, begin, 1, w.update);
  const T *q = x.qk, *k = x.keys(f, 1);
  const T* memory = call.state ? static_cast<const T*>(call.state) + place : nullptr;
  const T* momentum = call.momentum ? static_cast<const T*>(call.momentum) + place : nullptr;
  T *asked = x.read, *found = x.read + f.wide_v, *moved = w.out;
  fill(asked, T(0), f.wide_v), fill(found, T(0), f.wide_v), fill(moved, T(0), f.wide_v);
  if (memory) ask<true>(memory, K, V, f.far(), k, q, asked, found);
  if (momentum) ask<false, T>(momentum, K, V, f.far(), nullptr, q, nullptr, moved);
  const T theta = x.theta[0], keep = x.keep[0], eta = x.eta[0], scale = T(call.scale), own = dot(q, k, f.wide_k);
  for (int64_t i = 0; i < V; ++i) {
    const T write = theta * (w.update[i] - asked[i]);
    w.update[i] = write;
    moved[i] = scale * (keep * found[i] + eta * moved[i] + own * write);
  }
  write_row(moved, V, call.out, f.place(begin) * V, call.v.element);
  if (!call.final) return;
  T *after = static_cast<T*>(call.final) + place, *after_moved = static_cast<T*>(call.final_momentum) + place;
  for (int64_t row = 0; row < K; ++row) {
    const int64_t at = row * V;
    put_pair(memory ? memory + at : nullptr, momentum ? momentum + at : nullptr, V, keep, eta, k[row], w.update, after + at,
             after_moved + at);
  }
}

template <class T>
static void momentum_forward(const MomentumCall& call, int64_t job, char* scratch) {
  const Course<T> f(call, job);
  Arena arena{scratch};
  Walk<T> w(arena, f);
  if (f.end - f.begin == 1) return momentum_token(w, f);
  const Trail<T> trail = call.trail ? Trail<T>::of_call(f) : Trail<T>{w.state, 0, w.update - w.state};
  const int64_t chunks = f.chunks();
  const T* before = nullptr;
  if (call.state || call.momentum) {
    T* first = chunks ? trail.state(0) : w.state;
    read_pair(f, call.state, call.momentum, first);
    before = first;
  }
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = f.begin + i * f.C;
    T* after = i + 1 < chunks ? trail.state(i + 1) : call.final ? w.state : nullptr;
    w.stretch.turns = {f.span(i), f.span(i + 1)};
    walk_chunk(w, f, begin, smaller(f.C, f.end - begin), trail.update(i), before, after);
    before = after;
  }
  if (call.final) write_pair(f, before, call.final, call.final_momentum);
}

}  // namespace innerloop::INNERLOOP_ISA
