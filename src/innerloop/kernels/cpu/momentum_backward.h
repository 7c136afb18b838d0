// The gradient of the momentum rule: both memories and the writes D once more, then chunk after chunk in reverse.
//   dD = (scale W theta Q K^T)^T dO + w K dS' + u K dU',  dR = (I + A)^-T dD,  dA = -dR D^T,  dB = dO D^T,
//   [X; Y] = [dO; dR] [S U]^T,  Z = D [dS' dU']^T,  and with all weights in their places
//   dQ = scale (p X_S + r X_U) + dB' K,  dK = -(p before) Y_S - (r before) Y_U + w Z_S + u Z_U + (G + G^T) K + dB'^T Q,
//   dV = dR,  dS = Q^T (scale p dO) - K^T ((p before) dR) + p dS',  dU likewise with r, + r dS' + m dU'.
// w and u say how much of a write the chunk leaves in S and U. The gates' gradients run back through the recursions.
#pragma once

#include "momentum_token.h"

namespace innerloop::INNERLOOP_ISA {

template <class T>
struct WalkBack {
  Stretch<T> stretch;
  T *states, *updates;      // at every chunk's start [K, 2V]; of every token [V]
  T *faded;                 // [C, 2V]
  T *slope, *scaled;        // [2C, V]: dO and under it dR; [2C, 2V]: the same as both memories feel it
  T *pulled;                // [C, 2V]: what the gradients at the chunk's end answer to k
  T *turned, *turned_slope; // [V, 2K]: both memories and their gradients turned
  T *turned_update;         // [V, C]
  T *by_read, *by_pair;     // [C, C]: dB and dA, then dB' and G
  T *by_held;               // [C, C]: of W
  T *past, *write;          // [2C, 2K]: X and Y; [C, 2K]: Z
  T *grad_q, *grad_k, *grad_state;
  T *row_held, *row_moved, *last_moved, *by_theta;  // [C]
  double *by_p, *by_r;      // [C]
  double by_m;              // of the chunk's end

  WalkBack(Arena& arena, const Course<T>& f, int64_t chunks) {
    const int64_t c = f.C, square = c * f.step_c;
    stretch.take(arena, f);
    states = arena.take<T>(chunks * f.pair()), updates = arena.take<T>(chunks * c * f.step_v);
    faded = arena.take<T>(c * f.step_pair), slope = arena.take<T>(2 * c * f.step_v);
    scaled = arena.take<T>(2 * c * f.step_pair), pulled = arena.take<T>(c * f.step_pair);
    turned = arena.take<T>(f.wide_v * f.step_turned), turned_slope = arena.take<T>(f.wide_v * f.step_turned);
    turned_update = arena.take<T>(f.wide_v * f.step_c);
    by_read = arena.take<T>(square), by_pair = arena.take<T>(square), by_held = arena.take<T>(square);
    past = arena.take<T>(2 * c * f.step_turned), write = arena.take<T>(c * f.step_turned);
    grad_q = arena.take<T>(c * f.step_k), grad_k = arena.take<T>(c * f.step_k), grad_state = arena.take<T>(f.pair());
    T** const rows[] = {&row_held, &row_moved, &last_moved, &by_theta};
    for (T** row : rows) *row = arena.take<T>(f.wide_c);
    by_p = arena.take<double>(f.wide_c), by_r = arena.take<double>(f.wide_c);
  }
};

// Fill in both memories at every chunk's start and every token's write.
template <class T>
static void replay(WalkBack<T>& w, const Course<T>& f) {
  const MomentumCall& call = f.call;
  const bool begun = call.state || call.momentum;
  if (begun) read_pair(f, call.state, call.momentum, w.states);
  for (int64_t i = 0; i < f.chunks(); ++i) {
    const int64_t begin = f.begin + i * f.C, size = smaller(f.C, f.end - begin);
    const T* start = i == 0 && !begun ? nullptr : w.states + i * f.pair();
    T *update = w.updates + i * f.C * f.step_v, *read = w.stretch.read;
    read_course(w.stretch, f, begin, size);
    read_values(f, begin, size, update);
    fill_coupling(w.stretch, f, size, false);
    if (start)
      product<T>({w.stretch.keys(f, size), f.step_k}, size, {start, f.step_pair}, 2 * f.wide_v, f.K, {read, f.step_pair});
    correct<T>(w.stretch, f, size, update, start ? read : nullptr);
    if (i + 1 < f.chunks()) remember<T>(w.stretch, f, size, update, w.faded, start, w.states + (i + 1) * f.pair());
  }
}

// dR, under dO.
template <class T>
static void pull_back_writes(WalkBack<T>& w, const Course<T>& f, int64_t begin, int64_t size, bool pulled) {
  const Stretch<T>& x = w.stretch;
  T* dr = w.slope + size * f.step_v;
  for (int64_t t = 0; t < size; ++t)
    read_row(f.call.grad_out, f.at(f.call.grad_out, begin + t, f.head), f.V, w.slope + t * f.step_v);
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

template <class T>
static void turn_pair(const Course<T>& f, const T* pair, T* to) {
  transpose(pair, f.step_pair, f.K, f.wide_v, to, f.step_turned);
  transpose(pair + f.wide_v, f.step_pair, f.K, f.wide_v, to + f.wide_k, f.step_turned);
}

// to = a * the first half of a row of pairs + b * the second.
template <class T>
static void join(const Course<T>& f, const T* row, T a, T b, T* to, bool add) {
  const Vec<T> first = splat(a), second = splat(b);
  for (int64_t i = 0; i < f.wide_k; i += kLanes<T>) {
    const Vec<T> sum = load(row + i) * first + load(row + f.wide_k + i) * second;
    store(to + i, add ? load(to + i) + sum : sum);
  }
}

// dQ and dK without what unit length adds; [X; Y] and Z stay for the gates.
template <class T>
static void pull_back_keys(WalkBack<T>& w, const Course<T>& f, int64_t size, const T* update, const T* start, bool pulled) {
  const Stretch<T>& x = w.stretch;
  const T *q = x.qk, *k = x.keys(f, size), scale = T(f.call.scale);
  const Right<T> keys{k, f.step_k}, queries{q, f.step_k};
  if (start) {
    turn_pair(f, start, w.turned);
    product<T>({w.slope, f.step_v}, 2 * size, {w.turned, f.step_turned}, 2 * f.wide_k, f.V, {w.past, f.step_turned});
  }
  if (pulled) {
    turn_pair(f, w.grad_state, w.turned_slope);
    product<T>({update, f.step_v}, size, {w.turned_slope, f.step_turned}, 2 * f.wide_k, f.V, {w.write, f.step_turned});
  }
  for (int64_t t = 0; t < size; ++t) {
    T *dq = w.grad_q + t * f.step_k, *dk = w.grad_k + t * f.step_k;
    const T *reads = w.past + t * f.step_turned, *asks = reads + size * f.step_turned;
    if (start) join(f, reads, scale * x.p[t + 1], scale * x.r[t + 1], dq, false);
    if (start) join(f, asks, -x.p[t], -x.r[t], dk, false);
    if (pulled) join(f, w.write + t * f.step_turned, x.to_memory[t], x.to_momentum[t], dk, start != nullptr);
  }
  T *dq = w.grad_q, *dk = w.grad_k;
  product<T>({w.by_read, f.step_c}, size, keys, f.wide_k, size, {dq, f.step_k, start ? dq : nullptr}, Part::lower_left);
  product<T>({w.by_read, f.step_c, true}, size, queries, f.wide_k, size,
             {dk, f.step_k, start || pulled ? dk : nullptr}, Part::upper_left);
  product<T>({w.by_pair, f.step_c}, size, keys, f.wide_k, size, {dk, f.step_k, dk}, Part::lower_left);
  product<T>({w.by_pair, f.step_c, true}, size, keys, f.wide_k, size, {dk, f.step_k, dk}, Part::upper_left);
}

// What the carried memories say of p, r, m, of W's last row and of M's.
template <class T>
static void pull_back_carries(WalkBack<T>& w, const Course<T>& f, int64_t size, const T* start, bool pulled) {
  const Stretch<T>& x = w.stretch;
  const T *q = x.qk, *k = x.keys(f, size);
  const double scale = f.call.scale;
  w.by_m = 0;
  for (int64_t t = 0; t < size; ++t) w.by_p[t] = w.by_r[t] = 0;
  for (int64_t i = 0; i < f.wide_c; ++i) w.last_moved[i] = 0;
  for (int64_t t = 0; t < size && start; ++t) {
    const T *reads = w.past + t * f.step_turned, *asks = reads + size * f.step_turned;
    w.by_p[t] += scale * dot(reads, q + t * f.step_k, f.wide_k);
    w.by_r[t] += scale * dot(reads + f.wide_k, q + t * f.step_k, f.wide_k);
    if (!t) continue;
    w.by_p[t - 1] -= dot(asks, k + t * f.step_k, f.wide_k);
    w.by_r[t - 1] -= dot(asks + f.wide_k, k + t * f.step_k, f.wide_k);
  }
  for (int64_t s = 0; s < size && pulled; ++s) {
    const T* row = w.write + s * f.step_turned;
    w.by_held[(size - 1) * f.step_c + s] += dot(row, k + s * f.step_k, f.wide_k);
    w.last_moved[s] = dot(row + f.wide_k, k + s * f.step_k, f.wide_k);
  }
  for (int64_t i = 0; i < f.K && start && pulled; ++i) {
    const T *memory = start + i * f.step_pair, *slope = w.grad_state + i * f.step_pair;
    w.by_p[size - 1] += dot(memory, slope, f.wide_v);
    w.by_r[size - 1] += dot(memory + f.wide_v, slope, f.wide_v);
    w.by_m += dot(memory + f.wide_v, slope + f.wide_v, f.wide_v);
  }
}

// Back through the recursions of W, M, p, r and m, a row at a time.
template <class T>
static void pull_back_gates(WalkBack<T>& w, const Course<T>& f, int64_t begin, int64_t size) {
  const Stretch<T>& x = w.stretch;
  const MomentumCall& call = f.call;
  const int64_t wide = padded<T>(size);
  double p = 0, r = 0, m = w.by_m;
  T* const rows[] = {w.row_held, w.row_moved, w.by_theta};
  for (T* row : rows) std::memset(row, 0, wide * sizeof(T));
  for (int64_t t = size - 1; t >= 0; --t) {
    const bool last = t == size - 1;
    const T later_keep = last ? T(0) : x.keep[t + 1], later_eta = last ? T(0) : x.eta[t + 1];
    const int64_t at = t * f.step_c;
    Vec<T> by_keep{}, by_eta{};
    for (int64_t s = 0; s < wide; s += kLanes<T>) {
      const Vec<T> theta = load(x.theta + s), slope = load(w.by_held + at + s);
      const Vec<T> held = slope * theta + load(w.row_held + s) * later_keep;
      Vec<T> moved = held + load(w.row_moved + s) * later_eta, by_theta = slope * load(x.held + at + s);
      if (last) {
        moved += load(w.last_moved + s) * theta;
        by_theta += load(w.last_moved + s) * load(x.moved + at + s);
      }
      store(w.row_held + s, held);
      store(w.row_moved + s, moved);
      store(w.by_theta + s, load(w.by_theta + s) + by_theta);
      if (!t) continue;
      by_keep += held * load(x.held + at - f.step_c + s);
      by_eta += moved * load(x.moved + at - f.step_c + s);
    }
    p = w.by_p[t] + p * later_keep;
    r = w.by_r[t] + r * later_keep;
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
  const T* start = i == 0 && !call.state && !call.momentum ? nullptr : w.states + i * f.pair();
  const T* update = w.updates + i * f.C * f.step_v;
  read_course(w.stretch, f, begin, size);
  fill_coupling(w.stretch, f, size, true);
  pull_back_writes(w, f, begin, size, pulled);
  pull_back_coupling(w, f, size, update);
  pull_back_keys(w, f, size, update, start, pulled);
  pull_back_carries(w, f, size, start, pulled);
  pull_back_gates(w, f, begin, size);
  if (i > 0 || call.grad_state || call.grad_momentum) pull_back_pair(w, f, size, pulled);
  write_slopes(w, f, begin, size);
}

template <class T>
static void momentum_backward(const MomentumCall& call, int64_t job, char* scratch) {
  const Course<T> f(call, job);
  Arena arena{scratch};
  WalkBack<T> w(arena, f, f.chunks());
  bool pulled = call.grad_final || call.grad_final_momentum;
  if (pulled) read_pair(f, call.grad_final, call.grad_final_momentum, w.grad_state);
  replay(w, f);
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
  int64_t longest = call.header.bounds ? 0 : call.header.length;
  for (int64_t n = 0; call.header.bounds && n < call.header.sequences; ++n) {
    const int64_t length = call.header.bounds[n + 1] - call.header.bounds[n];
    if (length > longest) longest = length;
  }
  f.begin = 0, f.end = longest;
  if (way) WalkBack<T>(arena, f, f.chunks());
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
