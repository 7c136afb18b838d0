// The gradient of a whole sequence of one head: the memories and writes once more, then chunk after chunk in reverse.
//   dU = M^T dO + (P_C K) dS',  dR = (I + A)^-T dU,  dA = -dR U^T,  dM = dO U^T,  [X; Y] = [dO; dR] S^T,  Z = U dS'^T,
//   dQ = scale p X + dM' K,  dK = -beta p Y + P_C Z + (G + G^T) K + dM'^T Q,  dV = beta dR,
//   dS = p_C dS' + Q^T (scale p dO) - K^T (beta p dR),
// with M = scale P Q K^T, A = beta P K K^T, dM' = scale P dM and G = beta P dA.
#pragma once

#include "forward.h"

namespace innerloop::INNERLOOP_ISA {

template <class T>
struct Backward {
  Chunk<T> chunk;
  Trail<T> trails[kTogether];
  T *faded, *value;
  T *slope, *scaled;        // [2C, V]: dO and under it dR; the same, times scale p and -beta p
  T* turned;                         // [V, K]: S turned
  T *turned_update, *turned_answer;  // [V, C]: U turned, and dS'^T K^T
  T *by_score, *by_pair;    // [C, C]: dM and dA, then dM' and G
  T *past, *write;          // [2C, K]: X and Y; [C, K]: Z
  T *grad_q, *grad_k, *grad_v;
  T *grad_state, *grad_states[kTogether];  // [V, K]: dS' turned, the one that is at hand and all
  T* between[kTogether];    // memories between two that the call's trail keeps
  T* by_column;             // [C]: of each write, what tokens from here on say of its decays
  // [C]: of g, what passes over token t within the chunk; of p; and of beta
  double *by_gate, *by_carry, *by_rate;

  Backward(Arena& arena, const Frame<T>& f, int64_t chunks) {
    for (T*& state : grad_states) state = arena.take<T>(f.wide_v * f.step_k);
    for (int64_t n = 0; n < f.call.together && !f.call.trail; ++n)
      trails[n] = Trail<T>::of_scratch(arena, f, chunks);
    const int64_t c = f.C, square = c * f.step_c, missing = f.call.trail ? Trail<T>::of_call(f).every - 1 : 0;
    for (T*& states : between) states = arena.take<T>(missing * f.memory());
    chunk.take(arena, f);
    faded = arena.take<T>(c * f.step_v), value = arena.take<T>(c * f.step_v);
    slope = arena.take<T>((c + f.wide_c) * f.step_v), scaled = arena.take<T>(2 * c * f.step_v);
    turned = arena.take<T>(larger(f.wide_v * f.step_k, f.wide_k * f.step_v));
    turned_update = arena.take<T>(f.wide_v * f.step_c), turned_answer = arena.take<T>(f.wide_v * f.step_c);
    by_score = arena.take<T>(square), by_pair = arena.take<T>(square);
    past = arena.take<T>(2 * c * f.step_k), write = arena.take<T>(c * f.step_k);
    grad_q = arena.take<T>(c * f.step_k), grad_k = arena.take<T>(c * f.step_k), grad_v = arena.take<T>(f.step_v);
    by_column = arena.take<T>(f.wide_c);
    by_gate = arena.take<double>(f.wide_c), by_carry = arena.take<double>(f.wide_c), by_rate = arena.take<double>(f.wide_c);
  }
};

// The trail of a forward that left none.
template <class T>
static void replay(Backward<T>& x, const Frame<T>& f, const Trail<T>& trail) {
  const int64_t chunks = f.chunks();
  if (f.call.state && chunks) read_state(f, f.call.state, trail.state(0));
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = f.begin + i * f.C, size = smaller(f.C, f.end - begin);
    const T* start = i == 0 && !f.call.state ? nullptr : trail.state(i);
    T* update = trail.update(i);
    x.chunk.turns = {f.span(i), f.span(i + 1)};
    read_tokens(x.chunk, f, begin, size, false);
    read_values(x.chunk.turns, f, f.call.v, begin, size, update);
    if (f.call.corrects) {
      fill_coefficients(x.chunk, f, size, false);
      if (start)
        product<T>({x.chunk.keys(f, size), f.step_k}, size, {start, f.step_v}, f.wide_v, f.K, {x.chunk.read, f.step_v});
      correct<T>(x.chunk, f, size, update, start ? x.chunk.read : nullptr);
    }
    if (i + 1 < chunks) remember<T>(x.chunk, f, size, update, x.faded, start, trail.state(i + 1));
  }
}

// The memories behind the one that the trail keeps, up to that of chunk i's start.
template <class T>
static void fill_between(Backward<T>& x, const Frame<T>& f, const Trail<T>& trail, int64_t i, T* between) {
  const int64_t first = i - i % trail.every;
  const T* start = first == 0 && !f.call.state ? nullptr : trail.state(first);
  for (int64_t j = first; j < i; ++j, between += trail.memory) {
    x.chunk.turns = {f.span(j), f.span(j + 1)};
    read_tokens(x.chunk, f, f.begin + j * f.C, f.C, false);
    remember<T>(x.chunk, f, f.C, trail.update(j), x.faded, start, between);
    start = between;
  }
}

// dR, under dO.
template <class T>
static void pull_back_writes(Backward<T>& x, const Frame<T>& f, int64_t begin, int64_t size, bool pulled) {
  T* dr = x.slope + size * f.step_v;
  read_values(x.chunk.turns, f, f.call.grad_out, begin, size, x.slope);
  if (pulled) {
    product<T>({x.grad_state, f.step_k}, f.V, {x.chunk.kt, f.step_c}, padded<T>(size), f.K, {x.turned_answer, f.step_c});
    transpose(x.turned_answer, f.step_c, f.V, padded<T>(size), dr, f.step_v);
  }
  const Into<T> into{dr, f.step_v, pulled ? dr : nullptr, pulled ? x.chunk.ends : nullptr, 1, nullptr};
  product<T>({x.chunk.scores, f.step_c, true}, size, {x.slope, f.step_v}, f.wide_v, size, into, Part::upper_left);
  if (f.call.corrects) solve<T, true>(x.chunk.coupling, f.step_c, dr, f.step_v, size, f.wide_v);
}

// dM' and G, and what they say of decays and rates. g_t is in all that passes from before token t to it or beyond: the
// sums of just those, for a difference of sums of more would leave of a strong decay's gradient nothing but rounding.
template <class T>
static void pull_back_coefficients(Backward<T>& x, const Frame<T>& f, int64_t size, const T* update) {
  const int64_t wide = padded<T>(size);
  const Chunk<T>& chunk = x.chunk;
  const Right<T> turned{x.turned_update, f.step_c};
  transpose(update, f.step_v, size, f.wide_v, x.turned_update, f.step_c);
  product<T>({x.slope, f.step_v}, size, turned, wide, f.V, {x.by_score, f.step_c}, Part::lower_result);
  if (f.call.corrects)
    product<T>({x.slope + size * f.step_v, f.step_v}, size, turned, wide, f.V, {x.by_pair, f.step_c},
               Part::lower_result);
  for (int64_t s = 0; s < wide; s += kLanes<T>) store(x.by_column + s, Vec<T>{});
  for (int64_t t = size - 1; t >= 0; --t) {
    const int64_t at = t * f.step_c;
    const Vec<T> rate = splat(f.call.corrects ? chunk.rate[t] : T(0)), scale = splat(T(f.call.scale));
    Vec<T> passing{}, by_rate{};
    for (int64_t s = 0; s < wide; s += kLanes<T>) {
      T *by_score = x.by_score + at + s, *by_pair = x.by_pair + at + s;
      // Beyond the last tile of a lower result there is what an earlier chunk left.
      const bool above = s > t;
      const Vec<T> fade = load(chunk.fade + at + s), slope = above ? Vec<T>{} : load(by_score);
      Vec<T> by_decay = slope * load(chunk.scores + at + s);
      store(by_score, slope * fade * scale);
      if (f.call.corrects) {
        const Vec<T> pair = above ? Vec<T>{} : -load(by_pair), read = pair * load(chunk.pairs + at + s);
        by_decay += rate * read;
        by_rate += read;
        store(by_pair, pair * rate * fade);
      }
      by_decay += load(x.by_column + s);
      store(x.by_column + s, by_decay);
      passing += lanes_before<T>(by_decay, t - s);
    }
    if (f.call.corrects) x.by_pair[at + t] = 0;
    x.by_gate[t] = sum_of<T>(passing);
    x.by_rate[t] += sum_of<T>(by_rate);
  }
}

// dQ and dK without what unit length adds; [X; Y] and Z stay for the gates.
template <class T>
static void pull_back_keys(Backward<T>& x, const Frame<T>& f, int64_t size, const T* update, const T* start, bool pulled) {
  const Chunk<T>& chunk = x.chunk;
  const T *q = chunk.qk, *k = chunk.keys(f, size);
  const int64_t rows = f.call.corrects ? 2 * size : size;
  const Right<T> keys{k, f.step_k}, queries{q, f.step_k};
  if (start) {
    transpose(start, f.step_v, f.K, f.wide_v, x.turned, f.step_k);
    product<T>({x.slope, f.step_v}, rows, {x.turned, f.step_k}, f.wide_k, f.V, {x.past, f.step_k});
  }
  if (pulled) product<T>({update, f.step_v}, size, {x.grad_state, f.step_k}, f.wide_k, f.V, {x.write, f.step_k});
  product<T>({x.by_score, f.step_c}, size, keys, f.wide_k, size,
             {x.grad_q, f.step_k, start ? x.past : nullptr, start ? chunk.scaled_carry : nullptr, 1}, Part::lower_left);
  product<T>({x.by_score, f.step_c, true}, size, queries, f.wide_k, size,
             {x.grad_k, f.step_k, pulled ? x.write : nullptr, pulled ? chunk.ends : nullptr, 1}, Part::upper_left);
  if (!f.call.corrects) return;
  product<T>({x.by_pair, f.step_c}, size, keys, f.wide_k, size, {x.grad_k, f.step_k, x.grad_k}, Part::lower_left);
  const T* read = x.past + size * f.step_k;
  product<T>({x.by_pair, f.step_c, true}, size, keys, f.wide_k, size, {x.grad_k, f.step_k, x.grad_k}, Part::upper_left);
  for (int64_t t = 0; t < size && start; ++t)
    for (int64_t i = 0; i < f.wide_k; i += kLanes<T>) {
      T* to = x.grad_k + t * f.step_k + i;
      store(to, load(to) + load(read + t * f.step_k + i) * chunk.minus[t]);
    }
}

// What the carried memory says of decays and rates, row by row; sums of what passes over a token, as above.
template <class T>
static void pull_back_gates(Backward<T>& x, const Frame<T>& f, int64_t begin, int64_t size, bool start, bool pulled) {
  const Chunk<T>& chunk = x.chunk;
  const T *q = chunk.qk, *k = chunk.keys(f, size), *dr = x.slope + size * f.step_v;
  double before = 0;  // what was written in the chunk before token t and is carried beyond its end
  for (int64_t t = 0; t < size; ++t) {
    const int64_t row = t * f.step_k;
    x.by_gate[t] += before;
    if (start) x.by_carry[t] = double(chunk.scaled_carry[t]) * dot(x.past + row, q + row, f.wide_k);
    if (f.call.corrects) {
      const double asked = start ? dot(x.past + size * f.step_k + row, k + row, f.wide_k) : T(0);
      x.by_carry[t] += chunk.minus[t] * asked;
      x.by_rate[t] += dot(dr + t * f.step_v, x.value + t * f.step_v, f.wide_v) - chunk.carry[t] * asked;
    }
    if (pulled) before += double(chunk.ends[t]) * dot(x.write + row, k + row, f.wide_k);
  }
  double later = 0;  // what the memory of the chunk's start is read by from token t on, and carried beyond the end
  for (int64_t i = 0; i < f.V && start && pulled && f.call.g.data; ++i)
    later += double(chunk.last) * dot(x.turned + i * f.step_k, x.grad_state + i * f.step_k, f.wide_k);
  for (int64_t t = size - 1; t >= 0; --t) {
    later += x.by_carry[t];
    const int64_t at = f.place(begin + t);
    if (f.call.grad_g) {
      const bool clamped = read_one(f.call.g, f.at(f.call.g, begin + t, f.head)) < kSmallestDecay;
      static_cast<T*>(f.call.grad_g)[at] = clamped ? T(0) : T(x.by_gate[t] + later);
    }
    if (f.call.grad_beta) static_cast<T*>(f.call.grad_beta)[at] = T(x.by_rate[t] * chunk.slope_rate[t]);
  }
}

// The gradient at the memory of the chunk's start, turned.
template <class T>
static void pull_back_state(Backward<T>& x, const Frame<T>& f, int64_t size, bool pulled) {
  const Chunk<T>& chunk = x.chunk;
  const int64_t rows = f.call.corrects ? 2 * size : size;
  for (int64_t t = 0; t < rows; ++t) {
    const T factor = t < size ? chunk.scaled_carry[t] : chunk.minus[t - size];
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>)
      store(x.scaled + t * f.step_v + i, load(x.slope + t * f.step_v + i) * factor);
  }
  const Into<T> into{x.grad_state, f.step_k, pulled ? x.grad_state : nullptr, pulled ? &chunk.last : nullptr};
  product<T>({x.scaled, f.step_v, true}, f.V, {chunk.qk, f.step_k}, f.wide_k, rows, into);
}

// x = r u with unit u: dx = r (du - u (u . du)).
template <class T>
static void pull_back_unit(T* grad, const T* unit, T factor, int64_t n) {
  const T along = dot(grad, unit, n);
  for (int64_t i = 0; i < n; i += kLanes<T>) store(grad + i, (load(grad + i) - load(unit + i) * along) * factor);
}

template <class T>
static void write_gradients(Backward<T>& x, const Frame<T>& f, int64_t begin, int64_t size) {
  const Chunk<T>& chunk = x.chunk;
  const T *q = chunk.qk, *k = chunk.keys(f, size), *dr = x.slope + size * f.step_v;
  for (int64_t t = 0; t < size; ++t) {
    const int64_t row = t * f.step_k, at = f.place(begin + t);
    T *dq = x.grad_q + row, *dk = x.grad_k + row;
    const T by_square = T(2 * x.by_rate[t] * chunk.slope_square[t]);
    if (f.call.corrects == 2)
      for (int64_t i = 0; i < f.wide_k; i += kLanes<T>) store(dk + i, load(dk + i) + load(k + row + i) * by_square);
    if (f.call.unit) {
      pull_back_unit(dq, q + row, chunk.unit_q[t], f.wide_k);
      pull_back_unit(dk, k + row, chunk.unit_k[t], f.wide_k);
    }
    if (f.call.grad_q) write_row(dq, f.K, f.call.grad_q, at * f.K, f.call.grad_element);
    if (f.call.grad_k) write_row(dk, f.K, f.call.grad_k, at * f.K, f.call.grad_element);
    if (!f.call.grad_v) continue;
    const T rate = f.call.corrects ? chunk.rate[t] : T(1);
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) store(x.grad_v + i, load(dr + t * f.step_v + i) * rate);
    write_row(x.grad_v, f.V, f.call.grad_v, at * f.V, f.call.v.element);
  }
}

template <class T>
static void backward_chunk(Backward<T>& x, const Frame<T>& f, const Trail<T>& trail, int64_t i, const T* start,
                           bool pulled) {
  const int64_t begin = f.begin + i * f.C, size = smaller(f.C, f.end - begin);
  const T* update = trail.update(i);
  for (int64_t t = 0; t < size; ++t) x.by_carry[t] = x.by_rate[t] = 0;
  if (start) ask_block(start, f.memory());
  read_tokens(x.chunk, f, begin, size, true);
  if (f.call.corrects) read_values(x.chunk.turns, f, f.call.v, begin, size, x.value);
  fill_coefficients(x.chunk, f, size, true);
  pull_back_writes(x, f, begin, size, pulled);
  pull_back_coefficients(x, f, size, update);
  pull_back_keys(x, f, size, update, start, pulled);
  pull_back_gates(x, f, begin, size, start != nullptr, pulled);
  if (i > 0 || f.call.grad_state) pull_back_state(x, f, size, pulled);
  write_gradients(x, f, begin, size);
}

template <class T>
static void backward(const ScalarCall& call, int64_t job, char* scratch) {
  const Share share(call, job);
  Arena arena{scratch};
  const Frame<T> first(call, share.sequence, share.head);
  const int64_t chunks = first.chunks();
  Backward<T> x(arena, first, chunks);
  for (int64_t n = 0; n < share.heads; ++n) {
    const Frame<T> f(call, share.sequence, share.head + n);
    if (call.trail) x.trails[n] = Trail<T>::of_call(f);
    else replay(x, f, x.trails[n]);
    if (!call.grad_final) continue;
    read_state(f, call.grad_final, x.turned);
    transpose(x.turned, f.step_v, f.K, f.wide_v, x.grad_states[n], f.step_k);
  }
  for (int64_t i = chunks - 1; i >= 0; --i)
    for (int64_t n = 0; n < share.heads; ++n) {
      const Frame<T> f(call, share.sequence, share.head + n);
      const Trail<T>& trail = x.trails[n];
      const int64_t behind = i % trail.every;
      if (behind && (i + 1 == chunks || behind + 1 == trail.every)) fill_between(x, f, trail, i, x.between[n]);
      const T* start = behind ? x.between[n] + (behind - 1) * trail.memory : trail.state(i);
      x.grad_state = x.grad_states[n];
      x.chunk.turns = {f.span(i), share.after(f, i, n, -1)};
      backward_chunk(x, f, trail, i, i == 0 && !call.state ? nullptr : start, call.grad_final || i + 1 < chunks);
    }
  for (int64_t n = 0; n < share.heads && call.grad_state; ++n) {
    const Frame<T> f(call, share.sequence, share.head + n);
    const bool any = chunks || call.grad_final;
    if (any) transpose(x.grad_states[n], f.step_k, f.V, f.wide_k, x.turned, f.step_v);
    write_state(f, any ? x.turned : nullptr, call.grad_state);
  }
}

template <class T>
static int64_t backward_scratch(const ScalarCall& call) {
  Frame<T> f(call, 0, 0);
  f.stretch();
  Arena arena{nullptr};
  Backward<T> x(arena, f, f.chunks());
  return arena.used;
}

}  // namespace innerloop::INNERLOOP_ISA
