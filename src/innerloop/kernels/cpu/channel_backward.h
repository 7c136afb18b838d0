// The gradient of a whole sequence of one head whose memory fades by channel: memories and writes (once more, if no
// trail was left), then chunk after chunk in reverse. With M = <q, y>, A = stril<x, y>, W = E (and under it V), dO scaled:
//   dE = M^T dO + (y tail) dS',  dR = (I + A)^-T dE,  d<q, y> = dO W^T,  d<x, y> = -dR W^T,
//   d(q p) = dO S^T,  d(x p) = -dR S^T,  d(y tail) = W dS'^T,  dS = p_C dS' + (q p)^T dO - (x p)^T dR,
// and the rest is that of the faded products (channel_slope.h).
#pragma once

#include "backward.h"
#include "channel_forward.h"
#include "channel_slope.h"

namespace innerloop::INNERLOOP_ISA::channel {

template <class T>
struct Backward {
  Chunk<T> chunk;
  Slope<T> slope;
  Trail<T> trail;
  T *read, *minus;            // [tall, V]; -1 for every token
  T *slopes, *grad_v;         // [tall reads, V]: dO and -dR of a token, one under the other; [tall, V]
  T *grad_state;
  T *turned, *turned_slope;   // [V, K]: S and dS' turned
  T *turned_write;            // [V, tall]
  T *row_k, *row_v, *gate_v;  // of one token

  Backward(Arena& arena, const Frame<T>& f, int64_t chunks) {
    const int64_t tokens = f.tall();
    chunk.take(arena, f, true), slope.take(arena, f);
    trail = Trail<T>::of_scratch(arena, f, chunks);
    read = arena.take<T>(tokens * f.step_v), minus = arena.take<T>(tokens);
    slopes = arena.take<T>(f.reads * tokens * f.step_v), grad_v = arena.take<T>(tokens * f.step_v);
    grad_state = arena.take<T>(f.K * f.step_v);
    turned = arena.take<T>(f.wide_v * f.step_k), turned_slope = arena.take<T>(f.wide_v * f.step_k);
    turned_write = arena.take<T>(f.wide_v * tokens);
    row_k = arena.take<T>(f.step_k), row_v = arena.take<T>(f.step_v), gate_v = arena.take<T>(f.step_v);
    if (minus) fill(minus, T(-1), tokens);
  }
};

// Fill in the memory at every chunk's start and all that is written.
template <class T>
static void replay(Backward<T>& x, const Frame<T>& f) {
  Chunk<T>& c = x.chunk;
  const int64_t chunks = f.chunks();
  if (f.call.state && chunks) read_state(f, f.call.state, x.trail.state(0));
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = f.begin + i * f.C, size = smaller(f.C, f.end - begin);
    const bool last = i + 1 == chunks;
    const T* start = i == 0 && !f.call.state ? nullptr : x.trail.state(i);
    T* writes = x.trail.update(i);
    c.turns = {f.span(i), f.span(i + 1)};
    c.begin(f, size, false, false);
    read_values(c, f, begin, writes, x.gate_v);
    if (last && f.reads == 1) break;
    fade_chunk<T>(c, f, begin, c.rows, nullptr);
    if (start && c.reads)
      product<T>({c.rows, f.step_k}, size, {start, f.step_v}, f.wide_v, f.K, {x.read, f.step_v});
    correct<T>(c, f, writes, start ? x.read : nullptr, f.step_v, x.minus);
    if (!last) remember<T>(c, f, writes, start, x.trail.state(i + 1));
  }
}

// dO, and under it -dR; the gradient of what is added lies in x.grad_v.
template <class T>
static void pull_back_writes(Backward<T>& x, const Frame<T>& f, int64_t begin, bool pulled) {
  const Chunk<T>& c = x.chunk;
  const bool corrects = f.reads == 2;
  const int64_t step = f.reads * f.step_v, size = c.size;
  for (int64_t t = 0; t < size; ++t) {
    T* row = x.slopes + t * step;
    int64_t later = begin + t, head;
    if (c.turns.ahead(&later, &head)) ask_row(f.call.grad_out, f.own(f.call.grad_out, later), f.V);
    read_row(f.call.grad_out, f.own(f.call.grad_out, begin + t), f.V, row);
    multiply(row, row, T(f.call.scale), f.wide_v);
  }
  Into<T> into{corrects ? x.slopes + f.step_v : x.grad_v, corrects ? step : f.step_v};
  into.factor = corrects ? x.minus : nullptr;
  if (pulled) product<T>({x.slope.behind, f.step_k}, size, {x.grad_state, f.step_v}, f.wide_v, f.K, into);
  into.before = pulled ? into.data : nullptr;
  product<T>({c.grams, c.gram_step(f), true}, size, {x.slopes, step}, f.wide_v, size, into, Part::upper_left);
  if (corrects) solve<T, true>(c.asked_gram(f), c.gram_step(f), into.data, step, size, f.wide_v);
  if (f.writes == 1) {
    for (int64_t t = 0; t < size && corrects; ++t)
      multiply(x.grad_v + t * f.step_v, into.data + t * step, T(-1), f.wide_v);
    return;
  }
  const Into<T> value{x.grad_v, f.step_v, pulled ? x.grad_v : nullptr};
  if (pulled)
    product<T>({x.slope.behind + c.tall * f.step_k, f.step_k}, size, {x.grad_state, f.step_v}, f.wide_v, f.K,
               {x.grad_v, f.step_v});
  product<T>({c.grams + c.tall, f.step_c, true}, size, {x.slopes, f.step_v}, f.wide_v, c.reads * size, value,
             Part::upper_left);
}

// The gradients of the products; above the diagonal they are not looked at.
template <class T>
static void pull_back_grams(Backward<T>& x, const Frame<T>& f, const T* writes) {
  const Chunk<T>& c = x.chunk;
  const int64_t rest = (c.tall - c.size) * c.reads * f.step_c;
  fill(x.slope.grams + c.size * c.reads * f.step_c, T(0), rest);
  for (int64_t n = 0; n < f.writes; ++n) {
    transpose(writes + n * c.tall * f.step_v, f.step_v, c.tall, f.wide_v, x.turned_write, c.tall);
    for (int64_t r = 0; r < c.reads; ++r)
      product<T>({x.slopes + r * f.step_v, c.reads * f.step_v}, c.size, {x.turned_write, c.tall}, c.tall, f.V,
                 {x.slope.grams + r * f.step_c + n * c.tall, c.gram_step(f)}, Part::lower_result);
  }
}

// The gradients of rows since the chunk's start, of columns to its end, and of what passes through all of it.
template <class T>
static void pull_back_ends(Backward<T>& x, const Frame<T>& f, const T* writes, const T* start, bool pulled) {
  const Chunk<T>& c = x.chunk;
  const Slope<T>& s = x.slope;
  const int64_t rows = start ? c.size * c.reads : 0;
  if (start) {
    transpose(start, f.step_v, f.K, f.wide_v, x.turned, f.step_k);
    product<T>({x.slopes, f.step_v}, rows, {x.turned, f.step_k}, f.wide_k, f.V, {s.rows, f.step_k});
  }
  fill(s.rows + rows * f.step_k, T(0), (c.tall * c.reads - rows) * f.step_k);
  if (pulled) {
    transpose(x.grad_state, f.step_v, f.K, f.wide_v, x.turned_slope, f.step_k);
    product<T>({writes, f.step_v}, f.writes * c.tall, {x.turned_slope, f.step_k}, f.wide_k, f.V, {s.columns, f.step_k});
  } else {
    fill(s.columns, T(0), f.writes * c.tall * f.step_k);
  }
  fill(s.through, T(0), c.blocks * f.step_k);
  if (!start || !pulled) return;
  const T* whole = c.whole(f);
  for (int64_t i = 0; i < f.wide_k; i += kLanes<T>) {
    Vec<T> total{};
    for (int64_t v = 0; v < f.V; ++v)
      total += load(x.turned + v * f.step_k + i) * load(x.turned_slope + v * f.step_k + i);
    for (int64_t b = 0; b < c.blocks; ++b) store(s.through + b * f.step_k + i, total * load(whole + i));
  }
}

// dS, in the place of dS'.
template <class T>
static void pull_back_state(Backward<T>& x, const Frame<T>& f, bool pulled) {
  const Chunk<T>& c = x.chunk;
  const Into<T> into{x.grad_state, f.step_v, pulled ? x.grad_state : nullptr, pulled ? c.whole(f) : nullptr, 1};
  product<T>({c.rows, f.step_k, true}, f.K, {x.slopes, f.step_v}, f.wide_v, c.reads * c.size, into);
}

template <class T>
INNERLOOP_INLINE void add_product(T* to, const T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<T>) store(to + i, load(to + i) + load(a + i) * load(b + i));
}

// From the gradients of x and y to those of the key, which is returned, and of the gates beside it.
template <class T>
static T* pull_back_key(Backward<T>& x, const Frame<T>& f, int64_t token, int64_t t) {
  const ChannelCall& call = f.call;
  const Chunk<T>& c = x.chunk;
  const int64_t at = t * c.reads * f.step_k + f.step_k, place = f.place(token), apart = c.tall * f.step_k;
  T *dx = x.slope.rows + at, *dy = x.slope.columns + t * f.step_k, *row = x.row_k;
  const T *asking = x.slope.given + at, *y = c.columns + t * f.step_k;
  if (call.kind == kDelta) {
    const T rate = T(read_one(call.first, f.own(call.first, token))), by_rate = dot(dy, asking, f.wide_k);
    if (call.grad_first) write_row(&by_rate, 1, call.grad_first, place, call.first.element);
    for (int64_t i = 0; i < f.wide_k; i += kLanes<T>) store(dx + i, load(dx + i) + load(dy + i) * rate);
    return dx;
  }
  if (call.kind == kAdd) return dy;
  read_row(call.first, f.own(call.first, token), f.K, row);
  if (call.kind == kDecoupled) {
    add_product(dy, row, dx, f.wide_k);
    multiply(dx, dx, y, f.wide_k);
    if (call.grad_first) write_row(dx, f.K, call.grad_first, place * f.K, call.first.element);
    return dy;
  }
  add_product(dx, row, dy, f.wide_k);
  multiply(dy, dy, asking, f.wide_k);
  if (call.grad_first) write_row(dy, f.K, call.grad_first, place * f.K, call.first.element);
  if (call.grad_second) write_row(dx, f.K, call.grad_second, place * f.K, call.kappa_element);
  return dy + apart;
}

template <class T>
static void write_value(Backward<T>& x, const Frame<T>& f, int64_t token, T* grad) {
  const ChannelCall& call = f.call;
  const int64_t place = f.place(token) * f.V;
  if (call.kind == kDecoupled) {
    read_row(call.second, f.own(call.second, token), f.V, x.gate_v);
    if (call.grad_second) {
      read_row(call.v, f.own(call.v, token), f.V, x.row_v);
      multiply(x.row_v, x.row_v, grad, f.wide_v);
      write_row(x.row_v, f.V, call.grad_second, place, call.second.element);
    }
    multiply(grad, grad, x.gate_v, f.wide_v);
  }
  if (call.grad_v) write_row(grad, f.V, call.grad_v, place, call.v.element);
}

template <class T>
static void write_gradients(Backward<T>& x, const Frame<T>& f, int64_t begin) {
  const ChannelCall& call = f.call;
  const Chunk<T>& c = x.chunk;
  for (int64_t t = 0; t < c.size; ++t) {
    const int64_t token = begin + t, row = t * c.reads * f.step_k, place = f.place(token) * f.K;
    T *dq = x.slope.rows + row, *dk = pull_back_key(x, f, token, t);
    const T *own = c.columns + t * f.step_k, *q = x.slope.given + row;
    const T* k = call.kind == kDelta ? q + f.step_k : call.kind == kGeneralized ? own + c.tall * f.step_k : own;
    if (call.unit) {
      pull_back_unit(dq, q, c.unit_q[t], f.wide_k);
      pull_back_unit(dk, k, c.unit_k[t], f.wide_k);
    }
    if (call.grad_q) write_row(dq, f.K, call.grad_q, place, call.grad_element);
    if (call.grad_k) write_row(dk, f.K, call.grad_k, place, call.grad_element);
    if (call.grad_g) write_row(x.slope.decay + t * f.step_k, f.K, call.grad_g, place, call.g.element);
    write_value(x, f, token, x.grad_v + t * f.step_v);
  }
}

template <class T>
static void backward_chunk(Backward<T>& x, const Frame<T>& f, int64_t i, bool pulled) {
  const int64_t begin = f.begin + i * f.C;
  const T* start = i == 0 && !f.call.state ? nullptr : x.trail.state(i);
  const T* writes = x.trail.update(i);
  Chunk<T>& c = x.chunk;
  if (start) ask_block(start, f.memory());
  c.turns = {f.span(i), f.span(i - 1)};
  c.begin(f, smaller(f.C, f.end - begin), true, true);
  fade_chunk<T>(c, f, begin, x.slope.given, x.slope.saved_rows);
  fade_behind(c, f, x.slope.behind, x.slope.saved_columns);
  pull_back_writes(x, f, begin, pulled);
  pull_back_grams(x, f, writes);
  pull_back_ends(x, f, writes, start, pulled);
  pull_back_products(x.slope, c, f, x.row_k);
  if (i > 0 || f.call.grad_state) pull_back_state(x, f, pulled);
  write_gradients(x, f, begin);
}

template <class T>
static void backward(const ChannelCall& call, int64_t job, char* scratch) {
  const Frame<T> f(call, job);
  Arena arena{scratch};
  Backward<T> x(arena, f, call.trail ? 1 : f.chunks());
  bool pulled = call.grad_final;
  if (pulled) read_state(f, call.grad_final, x.grad_state);
  // A single token leaves no trail.
  if (call.trail && f.end - f.begin > 1) x.trail = Trail<T>::of_call(f);
  else replay(x, f);
  for (int64_t i = f.chunks() - 1; i >= 0; --i) {
    backward_chunk(x, f, i, pulled);
    pulled = true;
  }
  if (call.grad_state) write_state(f, pulled ? x.grad_state : nullptr, call.grad_state);
}

template <class T>
static int64_t backward_scratch(const ChannelCall& call) {
  Frame<T> f(call, 0);
  f.stretch();
  Arena arena{nullptr};
  Backward<T> x(arena, f, call.trail ? 1 : f.chunks());
  return arena.used;
}

template <class T>
static int64_t trail_bytes(const ChannelCall& call) {
  Frame<T> f(call, 0);
  f.stretch();
  return Trail<T>::of_call_bytes(f);
}

}  // namespace innerloop::INNERLOOP_ISA::channel
