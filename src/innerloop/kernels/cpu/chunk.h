// One chunk of one head: what is read of it, and the coefficients between its tokens.
#pragma once

#include "place.h"
#include "product.h"

namespace innerloop::INNERLOOP_ISA {

constexpr double kSmallestDecay = -120.0;  // e^-120 is 0 beside anything, and sums of it stay finite

// Widths of rows, and where a job stands.
template <class T>
struct Frame : Place<ScalarCall> {
  static constexpr bool kMayBeSparse = true;
  int64_t wide_k, wide_v, wide_c;  // padded to the lanes
  int64_t step_k, step_v, step_c;  // from row to row

  Frame(const ScalarCall& c, int64_t of_sequence, int64_t of_head) : Place(c, of_sequence, of_head) {
    wide_k = padded<T>(K), wide_v = padded<T>(V), wide_c = padded<T>(C);
    step_k = spread<T>(K), step_v = spread<T>(V), step_c = spread<T>(C);
  }
  int64_t memory() const { return K * step_v; }
};

constexpr int64_t kTogether = 4;  // heads of a job at most

// The heads of a job.
struct Share {
  int64_t sequence, head, heads;

  Share(const ScalarCall& c, int64_t job) {
    const int64_t shares = (c.heads + c.together - 1) / c.together;
    sequence = job / shares, head = job % shares * c.together;
    heads = smaller(c.together, c.heads - head);
  }
  // What is worked on after chunk i of its head n: that of the next head or, behind the last of them, another chunk.
  template <class F>
  Span after(const F& f, int64_t i, int64_t n, int64_t step) const {
    Span span = f.span(n + 1 < heads ? i : i + step);
    span.head = head + (n + 1 < heads ? n + 1 : 0);
    return span;
  }
};

template <class T>
struct Chunk {
  T *qk, *kt, *v;           // queries and under them keys [2C, K]; keys turned [K, C]; values [C, V]
  T *scores, *pairs, *fade; // [C, C], lower: scale P q k^T, and P k k^T without and with its beta
  T *coupling, *read;       // read: [2C, V], what the memory of the chunk's start answers to q and k
  T *carry, *ends, *rate;   // [C]: p, scale p, and P's last row; the step of the delta rule
  T *scaled_carry, *minus;  // minus: -beta p
  T *unit_q, *unit_k;       // by what queries and keys were multiplied
  double *total, *slope_rate, *slope_square;  // cumulated g; d rate / d beta and d rate / d |k|^2
  T last;                   // p of the whole chunk
  Turns turns;

  void take(Arena& arena, const Frame<T>& f) {
    const int64_t c = f.C;
    qk = arena.take<T>(2 * c * f.step_k), kt = arena.take<T>(f.wide_k * f.step_c), v = arena.take<T>(c * f.step_v);
    scores = arena.take<T>(c * f.step_c), pairs = arena.take<T>(c * f.step_c), fade = arena.take<T>(c * f.step_c);
    coupling = arena.take<T>(c * f.step_c), read = arena.take<T>(2 * c * f.step_v);
    T** const rows[] = {&carry, &ends, &rate, &scaled_carry, &minus, &unit_q, &unit_k};
    double** const wide_rows[] = {&total, &slope_rate, &slope_square};
    for (T** row : rows) *row = arena.take<T>(f.wide_c);
    for (double** row : wide_rows) *row = arena.take<double>(f.wide_c);
  }
  const T* keys(const Frame<T>& f, int64_t size) const { return qk + size * f.step_k; }
  T* keys(const Frame<T>& f, int64_t size) { return qk + size * f.step_k; }
};

template <class T>
static T make_unit(T* x, int64_t n) {
  const T factor = T(1) / std::sqrt(dot(x, x, n) + T(1e-6));
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
  return factor;
}

// beta / (1 + beta |k|^2) in the two ways that stay finite at beta = 0 and at beta = inf, and its slopes.
template <class T>
static T proximal_rate(T beta, T square, double* by_beta, double* by_square) {
  if (!(beta > 1)) {
    const T rest = 1 + beta * square, rate = beta / rest;
    *by_beta = 1.0 / (double(rest) * rest), *by_square = -double(rate) * rate;
    return rate;
  }
  const T below = 1 / beta + square;
  const bool empty = below < (sizeof(T) == 4 ? T(1.17549435e-38) : T(2.2250738585072014e-308));
  const T rate = empty ? T(0) : 1 / below;
  *by_beta = double(rate / beta) * (rate / beta), *by_square = -double(rate) * rate;
  return rate;
}

template <class T>
static void read_rates(Chunk<T>& x, const Frame<T>& f, int64_t begin, int64_t size) {
  const T* keys = x.keys(f, size);
  for (int64_t t = 0; t < size; ++t) {
    x.slope_rate[t] = 1, x.slope_square[t] = 0;
    if (!f.call.corrects) continue;
    const T beta = T(read_one(f.call.beta, f.at(f.call.beta, begin + t, f.head)));
    const T* k = keys + t * f.step_k;
    x.rate[t] = f.call.corrects == 1
                    ? beta
                    : proximal_rate(beta, dot(k, k, f.wide_k), &x.slope_rate[t], &x.slope_square[t]);
  }
}

// p, and P's last row. The decay is cumulated in double: a float sum cancels, and -inf - -inf is NaN.
template <class T>
static void read_decays(Chunk<T>& x, const Frame<T>& f, int64_t begin, int64_t size) {
  double sum = 0;
  for (int64_t t = 0; t < size && f.call.g.data; ++t) {
    const double g = read_one(f.call.g, f.at(f.call.g, begin + t, f.head));
    sum += g < kSmallestDecay ? kSmallestDecay : g;
    x.total[t] = sum;
  }
  for (int64_t t = 0; t < size; ++t) {
    x.carry[t] = f.call.g.data ? T(std::exp(x.total[t])) : T(1);
    x.ends[t] = f.call.g.data ? T(std::exp(sum - x.total[t])) : T(1);
    x.scaled_carry[t] = T(f.call.scale) * x.carry[t];
    x.minus[t] = -x.carry[t] * (f.call.corrects ? x.rate[t] : T(1));
  }
  x.last = x.carry[size - 1];
}

// Read q and k of a token, made unit length where the call says so; t is its place in the chunk.
template <class T>
static void read_token(Chunk<T>& x, const Frame<T>& f, int64_t token, int64_t t, T* q, T* k, bool queries) {
  int64_t later = token, head;
  if (x.turns.ahead(&later, &head)) {
    head = f.key_head_of(head);
    if (queries) ask_row(f.call.q, f.at(f.call.q, later, head), f.K);
    ask_row(f.call.k, f.at(f.call.k, later, head), f.K);
  }
  if (queries) read_row(f.call.q, f.at(f.call.q, token, f.key_head()), f.K, q);
  read_row(f.call.k, f.at(f.call.k, token, f.key_head()), f.K, k);
  if (!f.call.unit) return;
  if (queries) x.unit_q[t] = make_unit(q, f.wide_k);
  x.unit_k[t] = make_unit(k, f.wide_k);
}

// Read the chunk's tokens, all but v.
template <class T>
static void read_tokens(Chunk<T>& x, const Frame<T>& f, int64_t begin, int64_t size, bool queries) {
  T* keys = x.keys(f, size);
  for (int64_t t = 0; t < size; ++t)
    read_token(x, f, begin + t, t, x.qk + t * f.step_k, keys + t * f.step_k, queries);
  transpose(keys, f.step_k, size, f.wide_k, x.kt, f.step_c);
  read_rates(x, f, begin, size);
  read_decays(x, f, begin, size);
}

// P[t, s] = e^(total_t - total_s) for s <= t and 0 above the diagonal.
template <class T>
static void fill_fade(Chunk<T>& x, const Frame<T>& f, int64_t size) {
  for (int64_t t = 0; t < size; ++t) {
    T* row = x.fade + t * f.step_c;
    for (int64_t s = 0; s <= t; ++s) row[s] = f.call.g.data ? T(x.total[t] - x.total[s]) : T(0);
    const int64_t seen = padded<T>(t + 1);
    for (int64_t s = t + 1; s < seen; ++s) row[s] = T(-1e30);
    for (int64_t s = 0; s < seen; s += kLanes<T>) store(row + s, exp_of(load(row + s)));
    for (int64_t s = seen; s < padded<T>(size); s += kLanes<T>) store(row + s, Vec<T>{});
  }
}

// From products between tokens to coefficients; `coupling` has ones nowhere, for a solve reads below the diagonal only.
template <class T>
static void fade_products(Chunk<T>& x, const Frame<T>& f, int64_t size, bool queries) {
  const int64_t wide = padded<T>(size);
  for (int64_t t = 0; t < size; ++t) {
    const int64_t at = t * f.step_c;
    for (int64_t s = 0; s < wide; s += kLanes<T>) {
      // Beyond the last tile of a lower result there is what an earlier chunk left.
      const bool above = s > t;
      const Vec<T> fade = load(x.fade + at + s);
      if (queries) store(x.scores + at + s, above ? Vec<T>{} : load(x.scores + at + s) * fade * T(f.call.scale));
      if (!f.call.corrects) continue;
      const Vec<T> pairs = above ? Vec<T>{} : load(x.pairs + at + s) * fade;
      store(x.pairs + at + s, pairs);
      store(x.coupling + at + s, pairs * x.rate[t]);
    }
    if (f.call.corrects) x.pairs[at + t] = x.coupling[at + t] = 0;
  }
}

// The coefficients between tokens.
template <class T>
static void fill_coefficients(Chunk<T>& x, const Frame<T>& f, int64_t size, bool queries) {
  const int64_t wide = padded<T>(size);
  const Right<T> kt{x.kt, f.step_c};
  fill_fade(x, f, size);
  if (queries) product<T>({x.qk, f.step_k}, size, kt, wide, f.K, {x.scores, f.step_c}, Part::lower_result);
  if (f.call.corrects)
    product<T>({x.keys(f, size), f.step_k}, size, kt, wide, f.K, {x.pairs, f.step_c}, Part::lower_result);
  fade_products(x, f, size, queries);
}

// From values in `update` to the chunk's writes: (I + coupling) U = rate (V - p k S). No start: the memory is empty.
template <class T>
static void correct(Chunk<T>& x, const Frame<T>& f, int64_t size, T* update, const T* asked) {
  if (!f.call.corrects) return;
  for (int64_t t = 0; t < size; ++t) {
    T* row = update + t * f.step_v;
    const T* answer = asked + t * f.step_v;
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) {
      Vec<T> wanted = load(row + i) * x.rate[t];
      if (asked) wanted += load(answer + i) * x.minus[t];
      store(row + i, wanted);
    }
  }
  solve<T, false>(x.coupling, f.step_c, update, f.step_v, size, f.wide_v);
}

// after = p before + (P's last row k)^T U; no before: zeros. `faded` is for the update's rows times that row.
template <class T>
static void remember(Chunk<T>& x, const Frame<T>& f, int64_t size, const T* update, T* faded, const T* before, T* after) {
  for (int64_t t = 0; t < size; ++t)
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>)
      store(faded + t * f.step_v + i, load(update + t * f.step_v + i) * x.ends[t]);
  const Into<T> into{after, f.step_v, before, before ? &x.last : nullptr, 0, nullptr};
  product<T>({x.keys(f, size), f.step_k, true}, f.K, {faded, f.step_v}, f.wide_v, size, into);
}

}  // namespace innerloop::INNERLOOP_ISA
