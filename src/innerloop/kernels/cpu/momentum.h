// Gradient descent with momentum and forgetting on a linear memory: what a chunk of one head needs, and a sequence.
//   U' = eta U + theta k (v - S^T k)^T,  S' = keep S + U',  keep = 1 - alpha.
// M and W hold how much of write s is in U and S at token t, m and r how much of the U before the chunk, p of that S:
//   (I + stril(W before) theta K K^T) D = V - (p before) K S - (r before) K U,
//   O = scale (p Q S + r Q U + (W theta Q K^T) D).
#pragma once

#include "backward.h"

namespace innerloop::INNERLOOP_ISA {

// Widths of rows, and where a job stands. A memory and its momentum lie side by side, as one matrix [K, 2V].
template <class T>
struct Course : Place<MomentumCall> {
  int64_t wide_k, wide_v, wide_c;                        // padded to the lanes
  int64_t step_k, step_v, step_c, step_pair, step_both;  // from row to row; of [., 2V], and of [., 2C]

  Course(const MomentumCall& c, int64_t job) : Place(c, job / c.heads, job % c.heads) {
    wide_k = padded<T>(K), wide_v = padded<T>(V), wide_c = padded<T>(C);
    step_k = spread<T>(K), step_v = spread<T>(V), step_c = spread<T>(C);
    step_pair = spread<T>(2 * wide_v), step_both = spread<T>(2 * wide_c);
  }
  int64_t memory() const { return K * step_pair; }
  double gate(const Strided& x, int64_t token) const { return read_one(x, own(x, token)); }
};

template <class T>
struct Stretch {
  T *qk, *kt;                  // queries and under them keys [2C, K]; keys turned [K, C]
  T *scores, *pairs;           // [C, C], lower: q k^T and k k^T
  T *moved, *held;             // [C, C], lower: M and W
  T *reads, *coupling;         // [C, C], lower: scale W theta q k^T, and the W before theta k k^T
  T *read;                     // [2C, 2V]: what the memory and the momentum of the chunk's start answer to q and k
  T *theta, *eta, *keep;       // [C]
  T *p, *r, *m;                // [1 + C]: before the first token they are 1, 0, 1
  T *to_memory, *to_momentum;  // [C]: how much of each write the chunk leaves
  T *unit_q, *unit_k;          // by what queries and keys were multiplied
  Turns turns;

  void take(Arena& arena, const Course<T>& f) {
    qk = arena.take<T>(2 * f.C * f.step_k), kt = arena.take<T>(f.wide_k * f.step_c);
    T** const squares[] = {&scores, &pairs, &moved, &held, &reads, &coupling};
    for (T** square : squares) *square = arena.take<T>(f.C * f.step_c);
    read = arena.take<T>(2 * f.C * f.step_pair);
    T** const rows[] = {&theta, &eta, &keep, &p, &r, &m, &to_memory, &to_momentum, &unit_q, &unit_k};
    for (T** row : rows) *row = arena.take<T>(f.wide_c + 1);
  }
  const T* keys(const Course<T>& f, int64_t size) const { return qk + size * f.step_k; }
  T* keys(const Course<T>& f, int64_t size) { return qk + size * f.step_k; }
};

template <class T>
static void read_course(Stretch<T>& x, const Course<T>& f, int64_t begin, int64_t size) {
  const MomentumCall& call = f.call;
  T* keys = x.keys(f, size);
  x.p[0] = x.m[0] = 1, x.r[0] = 0;
  for (int64_t t = 0; t < size; ++t) {
    T *q = x.qk + t * f.step_k, *k = keys + t * f.step_k;
    int64_t later = begin + t, head;
    if (x.turns.ahead(&later, &head)) {
      ask_row(call.q, f.shared(call.q, later), f.K);
      ask_row(call.k, f.shared(call.k, later), f.K);
    }
    read_row(call.q, f.at(call.q, begin + t, f.key_head()), f.K, q);
    read_row(call.k, f.at(call.k, begin + t, f.key_head()), f.K, k);
    if (call.unit) x.unit_q[t] = make_unit(q, f.wide_k), x.unit_k[t] = make_unit(k, f.wide_k);
    x.theta[t] = T(f.gate(call.theta, begin + t)), x.eta[t] = T(f.gate(call.eta, begin + t));
    x.keep[t] = T(1 - f.gate(call.alpha, begin + t));
    x.p[t + 1] = x.keep[t] * x.p[t];
    x.m[t + 1] = x.eta[t] * x.m[t];
    x.r[t + 1] = x.keep[t] * x.r[t] + x.m[t + 1];
  }
  for (int64_t t = size; t < f.wide_c; ++t)
    x.theta[t] = x.to_memory[t] = x.to_momentum[t] = x.p[t + 1] = x.r[t + 1] = 0;
  transpose(keys, f.step_k, size, f.wide_k, x.kt, f.step_c);
}

// M and W by their recursions: no division, no logarithm, exact where a gate is 0 or 1.
template <class T>
static void fill_weights(Stretch<T>& x, const Course<T>& f, int64_t size) {
  const int64_t wide = padded<T>(size);
  for (int64_t t = 0; t < size; ++t) {
    T *moved = x.moved + t * f.step_c, *held = x.held + t * f.step_c;
    const Vec<T> eta = splat(x.eta[t]), keep = splat(x.keep[t]);
    for (int64_t s = 0; s < wide; s += kLanes<T>) store(moved + s, t ? load(moved - f.step_c + s) * eta : Vec<T>{});
    moved[t] = 1;
    for (int64_t s = 0; s < wide; s += kLanes<T>)
      store(held + s, load(moved + s) + (t ? load(held - f.step_c + s) * keep : Vec<T>{}));
  }
  const T *moved = x.moved + (size - 1) * f.step_c, *held = x.held + (size - 1) * f.step_c;
  for (int64_t s = 0; s < size; ++s) x.to_memory[s] = held[s] * x.theta[s], x.to_momentum[s] = moved[s] * x.theta[s];
}

template <class T>
static void fill_coupling(Stretch<T>& x, const Course<T>& f, int64_t size, bool queries) {
  const int64_t wide = padded<T>(size);
  const Right<T> kt{x.kt, f.step_c};
  fill_weights(x, f, size);
  if (queries) product<T>({x.qk, f.step_k}, size, kt, wide, f.K, {x.scores, f.step_c}, Part::lower_result);
  product<T>({x.keys(f, size), f.step_k}, size, kt, wide, f.K, {x.pairs, f.step_c}, Part::lower_result);
  const Vec<T> scale = splat(T(f.call.scale));
  for (int64_t t = 0; t < size; ++t) {
    const int64_t at = t * f.step_c;
    for (int64_t s = 0; s < wide; s += kLanes<T>) {
      // Beyond the last tile of a lower result there is what an earlier chunk left.
      const bool above = s > t;
      const Vec<T> theta = load(x.theta + s), before = t ? load(x.held + at - f.step_c + s) : Vec<T>{};
      if (above) store(x.pairs + at + s, Vec<T>{}), store(x.scores + at + s, Vec<T>{});
      store(x.coupling + at + s, above ? Vec<T>{} : load(x.pairs + at + s) * before * theta);
      if (queries) store(x.reads + at + s, above ? Vec<T>{} : load(x.scores + at + s) * load(x.held + at + s) * theta * scale);
    }
  }
}

// The chunk's writes, from values: those that the memory of each token would still need. No start: it is empty.
template <class T>
static void correct(const Stretch<T>& x, const Course<T>& f, int64_t size, T* update, const T* asked) {
  for (int64_t t = 0; t < size && asked; ++t) {
    T* row = update + t * f.step_v;
    const T* answer = asked + t * f.step_pair;
    const Vec<T> p = splat(x.p[t]), r = splat(x.r[t]);
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>)
      store(row + i, load(row + i) - p * load(answer + i) - r * load(answer + f.wide_v + i));
  }
  solve<T, false>(x.coupling, f.step_c, update, f.step_v, size, f.wide_v);
}

// S = p S + r U and U = m U from the chunk's start to its end; turned, the gradients from its end to its start.
template <class T, bool Turned>
static void carry(const Course<T>& f, T p, T r, T m, const T* from, T* to) {
  for (int64_t k = 0; k < f.K; ++k) {
    const T *s = from + k * f.step_pair, *u = s + f.wide_v;
    T *memory = to + k * f.step_pair, *momentum = memory + f.wide_v;
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) {
      const Vec<T> a = load(s + i), b = load(u + i);
      store(memory + i, Turned ? a * p : a * p + b * r);
      store(momentum + i, Turned ? a * r + b * m : b * m);
    }
  }
}

// Both after the chunk, from both before it; no before: zeros.
template <class T>
static void remember(const Stretch<T>& x, const Course<T>& f, int64_t size, const T* update, T* faded, const T* before,
                     T* after) {
  for (int64_t t = 0; t < size; ++t) {
    const T* row = update + t * f.step_v;
    T* to = faded + t * f.step_pair;
    const Vec<T> memory = splat(x.to_memory[t]), momentum = splat(x.to_momentum[t]);
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) {
      store(to + i, load(row + i) * memory);
      store(to + f.wide_v + i, load(row + i) * momentum);
    }
  }
  if (before) carry<T, false>(f, x.p[size], x.r[size], x.m[size], before, after);
  product<T>({x.keys(f, size), f.step_k, true}, f.K, {faded, f.step_pair}, 2 * f.wide_v, size,
             {after, f.step_pair, before ? after : nullptr});
}

// A memory and its momentum, of which one may be absent, side by side.
template <class T>
static void read_pair(const Course<T>& f, const void* memory, const void* momentum, T* to) {
  const int64_t element = f.call.wide ? kDouble : kFloat;
  for (int64_t k = 0; k < f.K; ++k)
    for (int64_t half = 0; half < 2; ++half) {
      void* data = const_cast<void*>(half ? momentum : memory);
      T* row = to + k * f.step_pair + half * f.wide_v;
      if (data) read_row<T>({data, 0, 0, 0, 1, element}, f.matrix() + k * f.V, f.V, row);
      else std::memset(row, 0, f.wide_v * sizeof(T));
    }
}
template <class T>
static void write_pair(const Course<T>& f, const T* from, void* memory, void* momentum) {
  for (int64_t k = 0; k < f.K; ++k)
    for (int64_t half = 0; half < 2; ++half) {
      T* to = static_cast<T*>(half ? momentum : memory);
      if (!to) continue;
      to += f.matrix() + k * f.V;
      if (from) std::memcpy(to, from + k * f.step_pair + half * f.wide_v, f.V * sizeof(T));
      else std::memset(to, 0, f.V * sizeof(T));
    }
}

template <class T>
struct Walk {
  Stretch<T> stretch;
  T *update, *out, *faded, *state;

  Walk(Arena& arena, const Course<T>& f) {
    stretch.take(arena, f);
    update = arena.take<T>(f.C * f.step_v), out = arena.take<T>(f.C * f.step_v);
    faded = arena.take<T>(f.C * f.step_pair), state = arena.take<T>(f.memory());
  }
};

// One chunk with its outputs and writes, from both matrices before it (absent: zeros) to those after it, if wanted.
template <class T>
static void walk_chunk(Walk<T>& w, const Course<T>& f, int64_t begin, int64_t size, T* update, const T* before, T* after) {
  Stretch<T>& x = w.stretch;
  read_course(x, f, begin, size);
  read_values(x.turns, f, f.call.v, begin, size, update);
  fill_coupling(x, f, size, true);
  if (before)
    product<T>({x.qk, f.step_k}, 2 * size, {before, f.step_pair}, 2 * f.wide_v, f.K, {x.read, f.step_pair});
  correct<T>(x, f, size, update, before ? x.read + size * f.step_pair : nullptr);
  for (int64_t t = 0; t < size && before; ++t) {
    const T* read = x.read + t * f.step_pair;
    const Vec<T> p = splat(T(f.call.scale) * x.p[t + 1]), r = splat(T(f.call.scale) * x.r[t + 1]);
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>)
      store(w.out + t * f.step_v + i, load(read + i) * p + load(read + f.wide_v + i) * r);
  }
  product<T>({x.reads, f.step_c}, size, {update, f.step_v}, f.wide_v, size,
             {w.out, f.step_v, before ? w.out : nullptr}, Part::lower_left);
  for (int64_t t = 0; t < size; ++t)
    write_row(w.out + t * f.step_v, f.V, f.call.out, f.place(begin + t) * f.V, f.call.v.element);
  if (after) remember<T>(x, f, size, update, w.faded, before, after);
}

}  // namespace innerloop::INNERLOOP_ISA
