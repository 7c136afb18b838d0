// The gradient of the momentum rule: both memories and the writes D (once more, if no trail was left), then chunk after
// chunk in reverse.
//   dD = (scale W theta Q K^T)^T dO + w K dS' + u K dU',  dR = (I + A)^-T dD,  dA = -dR D^T,  dB = dO D^T,
//   X, Y = [S; U] [dO; dR]^T,  Z = [dS'; dU'] D^T,  and with all weights in their places
//   dQ = scale (p X_S + r X_U)^T + dB' K,
//   dK = (-(p before) Y_S - (r before) Y_U + w Z_S + u Z_U)^T + (G + G^T) K + dB'^T Q,
//   dV = dR,  dS = Q^T (scale p dO) - K^T ((p before) dR) + p dS',  dU likewise with r, + r dS' + m dU'.
// w and u say how much of a write the chunk leaves in S and U. The gates' gradients run back through the recursions.
#pragma once

#include "momentum_token.h"

namespace innerloop::INNERLOOP_ISA {

template <class T>
struct WalkBack {
  Stretch<T> stretch;
  Trail<T> trail;
  T *faded;                 // [C, 2V]
  T *slope, *scaled;        // [2C, V]: dO and under it dR; [2C, 2V]: the same as both memories feel it
  T *pulled;                // [C, 2V]: what the gradients at the chunk's end answer to k
  T *turned_slope;          // [V, 2C]: dO and dR turned
  T *turned_update;         // [V, C]
  T *qt;                    // [K, C]: queries turned
  T *by_read, *by_pair;     // [C, C]: dB and dA, then dB' and G
  T *by_held;               // [C, C]: of W
  T *past, *write;          // [2K, 2C]: S and under it U times dO and dR; [2K, C]: dS' and dU' times D
  T *by_q, *by_k;           // [K, C]: what past and write come to
  T *grad_q, *grad_k, *grad_state;
  T *row_held, *row_moved, *by_theta;  // [C]
  // [C]: of p and r at the queries and before the keys, and of what the chunk leaves of each write
  T *query_p, *query_r, *key_p, *key_r, *left_memory, *left_momentum;
  double by_p, by_r, by_m;  // of the chunk's end

  WalkBack(Arena& arena, const Course<T>& f, int64_t chunks) {
    const int64_t c = f.C, square = c * f.step_c;
    stretch.take(arena, f);
    trail = Trail<T>::of_scratch(arena, f, chunks);
    faded = arena.take<T>(c * f.step_pair), slope = arena.take<T>(2 * c * f.step_v);
    scaled = arena.take<T>(2 * c * f.step_pair), pulled = arena.take<T>(c * f.step_pair);
    turned_slope = arena.take<T>(f.wide_v * f.step_both), turned_update = arena.take<T>(f.wide_v * f.step_c);
    qt = arena.take<T>(f.wide_k * f.step_c);
    by_read = arena.take<T>(square), by_pair = arena.take<T>(square), by_held = arena.take<T>(square);
    past = arena.take<T>(2 * f.K * f.step_both), write = arena.take<T>(2 * f.K * f.step_c);
    by_q = arena.take<T>(f.K * f.step_c), by_k = arena.take<T>(f.K * f.step_c);
    grad_q = arena.take<T>(f.wide_c * f.step_k), grad_k = arena.take<T>(f.wide_c * f.step_k);
    grad_state = arena.take<T>(f.memory());
    T** const rows[] = {&row_held, &row_moved, &by_theta};
    for (T** row : rows) *row = arena.take<T>(f.wide_c);
    T** const sums[] = {&query_p, &query_r, &key_p, &key_r, &left_memory, &left_momentum};
    for (T** row : sums) *row = arena.take<T>(f.wide_c);
  }
};

// Fill in both memories at every chunk's start and every token's write.
template <class T>
static void replay(WalkBack<T>& w, const Course<T>& f) {
  const MomentumCall& call = f.call;
  const bool begun = call.state || call.momentum;
  if (begun && f.chunks()) read_pair(f, call.state, call.momentum, w.trail.state(0));
  for (int64_t i = 0; i < f.chunks(); ++i) {
    const int64_t begin = f.begin + i * f.C, size = smaller(f.C, f.end - begin);
    const T* start = i == 0 && !begun ? nullptr : w.trail.state(i);
    T *update = w.trail.update(i), *read = w.stretch.read;
    w.stretch.turns = {f.span(i), f.span(i + 1)};
    read_course(w.stretch, f, begin, size);
    read_values(w.stretch.turns, f, call.v, begin, size, update);
    fill_coupling(w.stretch, f, size, false);
    if (start)
      product<T>({w.stretch.keys(f, size), f.step_k}, size, {start, f.step_pair}, 2 * f.wide_v, f.K, {read, f.step_pair});
    correct<T>(w.stretch, f, size, update, start ? read : nullptr);
    if (i + 1 < f.chunks()) remember<T>(w.stretch, f, size, update, w.faded, start, w.trail.state(i + 1));
  }
}

// dR, under dO.
template <class T>
static void pull_back_writes(WalkBack<T>& w, const Course<T>& f, int64_t begin, int64_t size, bool pulled) {
  const Stretch<T>& x = w.stretch;
  T* dr = w.slope + size * f.step_v;
  read_values(x.turns, f, f.call.grad_out, begin, size, w.slope);
  if (pulled)
    product<T>({x.keys(f, size), f.step_k}, size, {w.grad_state, f.step_pair}, 2 * f.wide_v, f.K, {w.pulled, f.step_pair});
  for (int64_t t = 0; t < size && pulled; ++t) {
    const T* row = w.pulled + t * f.step_pair;
    const Vec<T> memory = splat(x.to_memory[t]), momentum = splat(x.to_momentum[t]);
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>)
      store(dr + t * f.step_v + i, load(row + i) * memory + load(row + f.wide_v + i) * momentum);
  }
  product<T>({x.reads, f.step_c, true}, size, {w.slope, f.step_v}, f.wide_v, size,
             {dr, f.step_v, pulled ? dr : nullptr}, Part::upper_left);
  solve<T, true>(x.coupling, f.step_c, dr, f.step_v, size, f.wide_v);
}

// dB' and G, and what both say of W.
template <class T>
static void pull_back_coupling(WalkBack<T>& w, const Course<T>& f, int64_t size, const T* update) {
  const int64_t wide = padded<T>(size);
  const Stretch<T>& x = w.stretch;
  const Right<T> turned{w.turned_update, f.step_c};
  transpose(update, f.step_v, size, f.wide_v, w.turned_update, f.step_c);
  product<T>({w.slope, f.step_v}, size, turned, wide, f.V, {w.by_read, f.step_c}, Part::lower_result);
  product<T>({w.slope + size * f.step_v, f.step_v}, size, turned, wide, f.V, {w.by_pair, f.step_c}, Part::lower_result);
  const Vec<T> scale = splat(T(f.call.scale));
  for (int64_t t = 0; t < size; ++t) {
    const int64_t at = t * f.step_c;
    for (int64_t s = 0; s < wide; s += kLanes<T>) {
      const bool above = s > t;
      const Vec<T> theta = load(x.theta + s), held = load(x.held + at + s);
      const Vec<T> before = t ? load(x.held + at - f.step_c + s) : Vec<T>{};
      const Vec<T> read = above ? Vec<T>{} : load(w.by_read + at + s) * scale;
      const Vec<T> pair = above ? Vec<T>{} : -load(w.by_pair + at + s);
      store(w.by_held + at + s, read * load(x.scores + at + s));
      if (t) store(w.by_held + at - f.step_c + s, load(w.by_held + at - f.step_c + s) + pair * load(x.pairs + at + s));
      store(w.by_read + at + s, read * held * theta);
      store(w.by_pair + at + s, pair * before * theta);
    }
  }
}

// What both memories and their gradients answer to the slopes and the writes, turned: the matrices stay as they lie.
template <class T>
static void ask_slopes(WalkBack<T>& w, const Course<T>& f, int64_t size, const T* start, bool pulled) {
  const int64_t wide = padded<T>(size);
  if (start) {
    transpose(w.stretch.qk, f.step_k, size, f.wide_k, w.qt, f.step_c);
    transpose(w.slope, f.step_v, size, f.wide_v, w.turned_slope, f.step_both);
    transpose(w.slope + size * f.step_v, f.step_v, size, f.wide_v, w.turned_slope + wide, f.step_both);
  }
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t of = half * f.wide_v;
    if (start)
      product<T>({start + of, f.step_pair}, f.K, {w.turned_slope, f.step_both}, 2 * wide, f.V,
                 {w.past + half * f.K * f.step_both, f.step_both});
    if (pulled)
      product<T>({w.grad_state + of, f.step_pair}, f.K, {w.turned_update, f.step_c}, wide, f.V,
                 {w.write + half * f.K * f.step_c, f.step_c});
  }
}

// One key channel of all tokens: X and Y, and beside them Z, as queries, keys and gates feel them.
template <class T>
static void join_past(WalkBack<T>& w, const Course<T>& f, int64_t size, int64_t channel) {
  const Stretch<T>& x = w.stretch;
  const T *memory = w.past + channel * f.step_both, *momentum = memory + f.K * f.step_both;
  const T *q = w.qt + channel * f.step_c, *k = x.kt + channel * f.step_c, *p = x.p, *r = x.r;
  T *by_q = w.by_q + channel * f.step_c, *by_k = w.by_k + channel * f.step_c;
  T *query_p = w.query_p, *query_r = w.query_r, *key_p = w.key_p, *key_r = w.key_r;
  const Vec<T> scale = splat(T(f.call.scale));
  for (int64_t s = 0, wide = padded<T>(size); s < wide; s += kLanes<T>) {
    const Vec<T> a = load(memory + s) * scale, b = load(momentum + s) * scale;
    const Vec<T> c = load(memory + wide + s), d = load(momentum + wide + s);
    const Vec<T> query = load(q + s), key = load(k + s);
    store(by_q + s, a * load(p + 1 + s) + b * load(r + 1 + s));
    store(by_k + s, -(c * load(p + s) + d * load(r + s)));
    store(query_p + s, load(query_p + s) + a * query);
    store(query_r + s, load(query_r + s) + b * query);
    store(key_p + s, load(key_p + s) - c * key);
    store(key_r + s, load(key_r + s) - d * key);
  }
}
template <class T>
static void join_write(WalkBack<T>& w, const Course<T>& f, int64_t size, int64_t channel, bool add) {
  const Stretch<T>& x = w.stretch;
  const T *memory = w.write + channel * f.step_c, *momentum = memory + f.K * f.step_c, *k = x.kt + channel * f.step_c;
  const T *to_memory = x.to_memory, *to_momentum = x.to_momentum;
  T *by_k = w.by_k + channel * f.step_c, *left_memory = w.left_memory, *left_momentum = w.left_momentum;
  for (int64_t s = 0, wide = padded<T>(size); s < wide; s += kLanes<T>) {
    const Vec<T> a = load(memory + s), b = load(momentum + s), key = load(k + s);
    const Vec<T> sum = a * load(to_memory + s) + b * load(to_momentum + s);
    store(by_k + s, add ? load(by_k + s) + sum : sum);
    store(left_memory + s, load(left_memory + s) + a * key);
    store(left_momentum + s, load(left_momentum + s) + b * key);
  }
}

// dQ and dK without what unit length adds, and what the carried memories say of p, r, m and of W's and M's last rows.
template <class T>
static void pull_back_keys(WalkBack<T>& w, const Course<T>& f, int64_t size, const T* start, bool pulled) {
  const Stretch<T>& x = w.stretch;
  const int64_t wide = padded<T>(size);
  ask_slopes(w, f, size, start, pulled);
  T* const sums[] = {w.query_p, w.query_r, w.key_p, w.key_r, w.left_memory, w.left_momentum};
  for (T* sum : sums) std::memset(sum, 0, wide * sizeof(T));
  w.by_p = w.by_r = w.by_m = 0;
  for (int64_t i = 0; i < f.K; ++i) {
    if (start) join_past(w, f, size, i);
    if (pulled) join_write(w, f, size, i, start != nullptr);
    if (!start || !pulled) continue;
    const T *memory = start + i * f.step_pair, *slope = w.grad_state + i * f.step_pair;
    w.by_p += dot(memory, slope, f.wide_v);
    w.by_r += dot(memory + f.wide_v, slope, f.wide_v);
    w.by_m += dot(memory + f.wide_v, slope + f.wide_v, f.wide_v);
  }
  T *dq = w.grad_q, *dk = w.grad_k;
  if (start) transpose(w.by_q, f.step_c, f.K, wide, dq, f.step_k);
  if (start || pulled) transpose(w.by_k, f.step_c, f.K, wide, dk, f.step_k);
  const Right<T> keys{x.keys(f, size), f.step_k}, queries{x.qk, f.step_k};
  product<T>({w.by_read, f.step_c}, size, keys, f.wide_k, size, {dq, f.step_k, start ? dq : nullptr}, Part::lower_left);
  product<T>({w.by_read, f.step_c, true}, size, queries, f.wide_k, size,
             {dk, f.step_k, start || pulled ? dk : nullptr}, Part::upper_left);
  product<T>({w.by_pair, f.step_c}, size, keys, f.wide_k, size, {dk, f.step_k, dk}, Part::lower_left);
  product<T>({w.by_pair, f.step_c, true}, size, keys, f.wide_k, size, {dk, f.step_k, dk}, Part::upper_left);
}

// Back through the recursions of W, M, p, r and m, a row at a time.
template <class T>
static void pull_back_gates(WalkBack<T>& w, const Course<T>& f, int64_t begin, int64_t size) {
  const Stretch<T>& x = w.stretch;
  const MomentumCall& call = f.call;
  const int64_t wide = padded<T>(size);
  double p = w.by_p, r = w.by_r, m = w.by_m;
  T* const rows[] = {w.row_held, w.row_moved, w.by_theta};
  for (T* row : rows) std::memset(row, 0, wide * sizeof(T));
  for (int64_t t = size - 1; t >= 0; --t) {
    const bool last = t == size - 1;
    const T later_keep = last ? T(0) : x.keep[t + 1], later_eta = last ? T(0) : x.eta[t + 1];
    const int64_t at = t * f.step_c;
    Vec<T> by_keep{}, by_eta{};
    for (int64_t s = 0; s < wide; s += kLanes<T>) {
      const Vec<T> theta = load(x.theta + s);
      const Vec<T> slope = load(w.by_held + at + s) + (last ? load(w.left_memory + s) : Vec<T>{});
      const Vec<T> held = slope * theta + load(w.row_held + s) * later_keep;
      Vec<T> moved = held + load(w.row_moved + s) * later_eta, by_theta = slope * load(x.held + at + s);
      if (last) {
        moved += load(w.left_momentum + s) * theta;
        by_theta += load(w.left_momentum + s) * load(x.moved + at + s);
      }
      store(w.row_held + s, held);
      store(w.row_moved + s, moved);
      store(w.by_theta + s, load(w.by_theta + s) + by_theta);
      if (!t) continue;
      by_keep += held * load(x.held + at - f.step_c + s);
      by_eta += moved * load(x.moved + at - f.step_c + s);
    }
    // Of the chunk's end they are there already; before a token they are those after the one before it.
    p = (last ? p : p * later_keep + w.key_p[t + 1]) + w.query_p[t];
    r = (last ? r : r * later_keep + w.key_r[t + 1]) + w.query_r[t];
    m = (last ? m : m * later_eta) + r;
    const int64_t to = f.place(begin + t);
    if (call.grad_alpha) static_cast<T*>(call.grad_alpha)[to] = T(-(sum_of<T>(by_keep) + p * x.p[t] + r * x.r[t]));
    if (call.grad_eta) static_cast<T*>(call.grad_eta)[to] = T(sum_of<T>(by_eta) + m * x.m[t]);
  }
  for (int64_t t = 0; t < size && call.grad_theta; ++t)
    static_cast<T*>(call.grad_theta)[f.place(begin + t)] = w.by_theta[t];
}

// The gradients at both memories of the chunk's start.
template <class T>
static void pull_back_pair(WalkBack<T>& w, const Course<T>& f, int64_t size, bool pulled) {
  const Stretch<T>& x = w.stretch;
  const T scale = T(f.call.scale);
  for (int64_t t = 0; t < 2 * size; ++t) {
    const bool asks = t >= size;
    const Vec<T> p = splat(asks ? -x.p[t - size] : scale * x.p[t + 1]), r = splat(asks ? -x.r[t - size] : scale * x.r[t + 1]);
    const T* row = w.slope + t * f.step_v;
    T* to = w.scaled + t * f.step_pair;
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) {
      store(to + i, load(row + i) * p);
      store(to + f.wide_v + i, load(row + i) * r);
    }
  }
  if (pulled) carry<T, true>(f, x.p[size], x.r[size], x.m[size], w.grad_state, w.grad_state);
  product<T>({x.qk, f.step_k, true}, f.K, {w.scaled, f.step_pair}, 2 * f.wide_v, 2 * size,
             {w.grad_state, f.step_pair, pulled ? w.grad_state : nullptr});
}

template <class T>
static void write_slopes(WalkBack<T>& w, const Course<T>& f, int64_t begin, int64_t size) {
  const MomentumCall& call = f.call;
  const Stretch<T>& x = w.stretch;
  for (int64_t t = 0; t < size; ++t) {
    const int64_t row = t * f.step_k, at = f.place(begin + t);
    T *dq = w.grad_q + row, *dk = w.grad_k + row;
    if (call.unit) {
      pull_back_unit(dq, x.qk + row, x.unit_q[t], f.wide_k);
      pull_back_unit(dk, x.keys(f, size) + row, x.unit_k[t], f.wide_k);
    }
    if (call.grad_q) write_row(dq, f.K, call.grad_q, at * f.K, call.grad_element);
    if (call.grad_k) write_row(dk, f.K, call.grad_k, at * f.K, call.grad_element);
    if (call.grad_v) write_row(w.slope + (size + t) * f.step_v, f.V, call.grad_v, at * f.V, call.v.element);
  }
}

template <class T>
static void walk_back_chunk(WalkBack<T>& w, const Course<T>& f, int64_t i, bool pulled) {
  const MomentumCall& call = f.call;
  const int64_t begin = f.begin + i * f.C, size = smaller(f.C, f.end - begin);
  const T* start = i == 0 && !call.state && !call.momentum ? nullptr : w.trail.state(i);
  const T* update = w.trail.update(i);
  if (start) ask_block(start, f.memory());
  w.stretch.turns = {f.span(i), f.span(i - 1)};
  read_course(w.stretch, f, begin, size);
  fill_coupling(w.stretch, f, size, true);
  pull_back_writes(w, f, begin, size, pulled);
  pull_back_coupling(w, f, size, update);
  pull_back_keys(w, f, size, start, pulled);
  pull_back_gates(w, f, begin, size);
  if (i > 0 || call.grad_state || call.grad_momentum) pull_back_pair(w, f, size, pulled);
  write_slopes(w, f, begin, size);
}

template <class T>
static void momentum_backward(const MomentumCall& call, int64_t job, char* scratch) {
  const Course<T> f(call, job);
  Arena arena{scratch};
  WalkBack<T> w(arena, f, call.trail ? 1 : f.chunks());
  bool pulled = call.grad_final || call.grad_final_momentum;
  if (pulled) read_pair(f, call.grad_final, call.grad_final_momentum, w.grad_state);
  // A single token leaves no trail.
  if (call.trail && f.end - f.begin > 1) w.trail = Trail<T>::of_call(f);
  else replay(w, f);
  for (int64_t i = f.chunks() - 1; i >= 0; --i) {
    walk_back_chunk(w, f, i, pulled);
    pulled = true;
  }
  write_pair(f, pulled ? w.grad_state : nullptr, call.grad_state, call.grad_momentum);
}

template <class T>
static int64_t momentum_scratch_of(const MomentumCall& call, int64_t way) {
  Course<T> f(call, 0);
  Arena arena{nullptr};
  f.stretch();
  if (way == 2) return Trail<T>::of_call_bytes(f);
  if (way) WalkBack<T>(arena, f, call.trail ? 1 : f.chunks());
  else Walk<T>(arena, f);
  return arena.used;
}

static int64_t momentum_scratch(const void* data, int64_t way) {
  const MomentumCall& call = *static_cast<const MomentumCall*>(data);
  return call.wide ? momentum_scratch_of<double>(call, way) : momentum_scratch_of<float>(call, way);
}

static void momentum_run(const void* data, int64_t way, int64_t job, char* scratch) {
  const MomentumCall& call = *static_cast<const MomentumCall*>(data);
  if (call.wide) return way ? momentum_backward<double>(call, job, scratch) : momentum_forward<double>(call, job, scratch);
  return way ? momentum_backward<float>(call, job, scratch) : momentum_forward<float>(call, job, scratch);
}

}  // namespace innerloop::INNERLOOP_ISA
