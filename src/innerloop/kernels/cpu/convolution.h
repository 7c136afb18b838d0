// A depthwise causal convolution over time, and SiLU: y_t = silu(b + sum_j w_j x_{t - W + 1 + j}), row by row.
// In front of a sequence's first token stands its window, the last W - 1 inputs of an earlier call.
#pragma once

#include "activation.h"
#include "chunk.h"

namespace innerloop::INNERLOOP_ISA {

template <class T>
struct Convolution {
  const ConvolutionCall& call;
  int64_t W, C, wide;   // taps; channels, and padded to the lanes
  T *weight, *bias;     // [W, C]; [C]
  T **inputs, **slopes; // W rows each, the oldest first: inputs, and gradients at the sums that SiLU takes
  T *row, *sums;        // [C]; [W + 1, C], the gradients of weight and bias

  Convolution(Arena& arena, const ConvolutionCall& c) : call(c), W(c.taps), C(c.channels), wide(padded<T>(c.channels)) {
    weight = arena.take<T>(W * wide), bias = arena.take<T>(wide);
    row = arena.take<T>(wide), sums = arena.take<T>((W + 1) * wide);
    inputs = arena.take<T*>(W), slopes = arena.take<T*>(W);
    T *first = arena.take<T>(W * wide), *second = arena.take<T>(W * wide);
    if (!arena.memory) return;
    for (int64_t j = 0; j < W; ++j) {
      inputs[j] = first + j * wide, slopes[j] = second + j * wide;
      read_wide(call.weight, j, weight + j * wide);
    }
    read_wide(call.bias, 0, bias);
    std::memset(sums, 0, (W + 1) * wide * sizeof(T));
  }

  // Tokens of all rows are counted on, so that both ways to lay out sequences read alike.
  int64_t begin(int64_t sequence) const {
    return call.header.bounds ? call.header.bounds[sequence] : sequence * call.header.length;
  }
  int64_t end(int64_t sequence) const { return begin(sequence + 1); }
  // The first sequence that ends behind a token.
  int64_t sequence_of(int64_t token) const {
    if (!call.header.bounds) return token / call.header.length;
    int64_t low = 0, high = call.header.sequences;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (end(middle) > token) high = middle;
      else low = middle + 1;
    }
    return low;
  }
  int64_t at(const Strided& x, int64_t token) const {
    if (call.header.bounds) return token * x.token;
    return token / call.header.length * x.row + token % call.header.length * x.token;
  }

  // A row in the precision of arithmetic; no data: zeros.
  void read_wide(const void* data, int64_t number, T* to) const {
    if (data) std::memcpy(to, static_cast<const T*>(data) + number * C, C * sizeof(T));
    for (int64_t i = data ? C : 0; i < wide; ++i) to[i] = 0;
  }
  // The input at a token, which may lie in front of its sequence.
  void fetch(int64_t sequence, int64_t token, T* to) const {
    const int64_t before = begin(sequence) - token;
    if (before > 0) read_wide(call.window, (sequence + 1) * (W - 1) - before, to);
    else read_row(call.x, at(call.x, token), C, to);
  }
  // Let the rows in front of a token stand where one step brings them to their places.
  void start(int64_t sequence, int64_t token) const {
    for (int64_t j = 1; j < W; ++j) fetch(sequence, token - W + j, inputs[j]);
  }
  // Make room for the newest row, over the oldest.
  T* step(T** rows) const {
    T* oldest = rows[0];
    for (int64_t j = 1; j < W; ++j) rows[j - 1] = rows[j];
    return rows[W - 1] = oldest;
  }
};

// The taps beside the rows that they multiply, or turned. A number that the compiler knows leaves no loop and no pointer
// to read again after every store.
template <class T, int Taps, bool Turned>
struct Products {
  const T *weight[Taps], *rows[Taps];

  Products(const Convolution<T>& x, T* const* some) {
#pragma GCC unroll 4
    for (int j = 0; j < Taps; ++j) weight[j] = x.weight + (Turned ? Taps - 1 - j : j) * x.wide, rows[j] = some[j];
  }
  Vec<T> at(int64_t i, Vec<T> sum) const {
#pragma GCC unroll 4
    for (int j = 0; j < Taps; ++j) sum += load(weight[j] + i) * load(rows[j] + i);
    return sum;
  }
};
template <class T, bool Turned>
struct Products<T, 0, Turned> {
  const Convolution<T>& x;
  T* const* rows;

  Products(const Convolution<T>& all, T* const* some) : x(all), rows(some) {}
  Vec<T> at(int64_t i, Vec<T> sum) const {
    for (int64_t j = 0; j < x.W; ++j) sum += load(x.weight + (Turned ? x.W - 1 - j : j) * x.wide + i) * load(rows[j] + i);
    return sum;
  }
};

template <class T, int Taps>
static void convolve_row(const Convolution<T>& x) {
  const Products<T, Taps, false> products(x, x.inputs);
  const bool silu = x.call.silu;
  const T* bias = x.bias;
  T* to = x.row;
  for (int64_t i = 0, n = x.wide; i < n; i += kLanes<T>) {
    const Vec<T> sum = products.at(i, load(bias + i));
    store(to + i, silu ? activate(sum, kSilu) : sum);
  }
}

template <class T, int Taps>
static void convolve(Convolution<T>& x, int64_t sequence, int64_t begin, int64_t end) {
  x.start(sequence, begin);
  for (int64_t t = begin; t < end; ++t) {
    x.fetch(sequence, t, x.step(x.inputs));
    convolve_row<T, Taps>(x);
    write_row(x.row, x.C, x.call.out, t * x.C, x.call.x.element);
  }
}

// The gradient at the newest input's sum, from that at what SiLU makes of it.
template <class T, int Taps>
static void pull_back_sum(const Convolution<T>& x, T* slope) {
  const Products<T, Taps, false> products(x, x.inputs);
  const T* bias = x.bias;
  for (int64_t i = 0, n = x.wide; i < n; i += kLanes<T>) {
    Vec<T> by_sum;
    activate(products.at(i, load(bias + i)), kSilu, &by_sum);
    store(slope + i, load(slope + i) * by_sum);
  }
}

// What it says of the weights, one tap after another.
template <class T>
static void add_to_sums(const Convolution<T>& x, const T* slope) {
  const int64_t n = x.wide;
  for (int64_t j = 0; j <= x.W; ++j) {
    T* to = x.sums + j * n;
    const T* input = j < x.W ? x.inputs[j] : nullptr;
    for (int64_t i = 0; i < n; i += kLanes<T>)
      store(to + i, load(to + i) + (input ? load(slope + i) * load(input + i) : load(slope + i)));
  }
}

// The gradient at one input, which may lie in front of its sequence: the slopes' oldest row is the token's own.
template <class T, int Taps>
static void pull_back_input(Convolution<T>& x, int64_t sequence, int64_t token) {
  const ConvolutionCall& call = x.call;
  const int64_t kept = token - x.end(sequence) + x.W - 1, before = x.begin(sequence) - token;
  void* to = before > 0 ? call.grad_window : call.grad_x;
  if (!to) return;
  x.read_wide(kept < 0 ? nullptr : call.grad_after, sequence * (x.W - 1) + kept, x.row);
  const Products<T, Taps, true> products(x, x.slopes);
  T* row = x.row;
  for (int64_t i = 0, n = x.wide; i < n; i += kLanes<T>) store(row + i, products.at(i, load(row + i)));
  if (before > 0) write_row(x.row, x.C, to, ((sequence + 1) * (x.W - 1) - before) * x.C, call.wide ? kDouble : kFloat);
  else write_row(x.row, x.C, to, token * x.C, call.x.element);
}

// The gradients at inputs from begin to end, of which those in front of the sequence are its window.
template <class T, int Taps>
static void pull_back_convolution(Convolution<T>& x, int64_t sequence, int64_t begin, int64_t end) {
  const int64_t from = begin < x.begin(sequence) ? x.begin(sequence) : begin;
  for (int64_t j = 0; j < x.W; ++j) std::memset(x.slopes[j], 0, x.wide * sizeof(T));
  x.start(sequence, from);
  for (int64_t t = from; t < end + x.W - 1; ++t) {
    T* slope = x.step(x.slopes);
    if (t < x.end(sequence)) {
      x.fetch(sequence, t, x.step(x.inputs));
      read_row(x.call.grad_out, x.at(x.call.grad_out, t), x.C, slope);
      if (x.call.silu) pull_back_sum<T, Taps>(x, slope);
      if (t < end && x.call.grad_weight) add_to_sums(x, slope);
    } else {
      std::memset(slope, 0, x.wide * sizeof(T));
    }
    if (t - x.W + 1 >= begin) pull_back_input<T, Taps>(x, sequence, t - x.W + 1);
  }
}

// A job is a share of all tokens, or behind those a share of all windows.
template <class T, int Taps>
static void convolution(const ConvolutionCall& call, int64_t way, int64_t job, char* scratch) {
  Arena arena{scratch};
  Convolution<T> x(arena, call);
  const int64_t sequences = call.header.sequences;
  if (job >= call.shares) {
    const int64_t first = (job - call.shares) * call.windows;
    for (int64_t n = first; n < smaller(first + call.windows, sequences); ++n) {
      if (way) pull_back_convolution<T, Taps>(x, n, x.begin(n) - x.W + 1, x.begin(n));
      for (int64_t j = 0; j < x.W - 1 && !way; ++j) {
        x.fetch(n, x.end(n) - x.W + 1 + j, x.row);
        std::memcpy(static_cast<T*>(call.after) + (n * (x.W - 1) + j) * x.C, x.row, x.C * sizeof(T));
      }
    }
    return;
  }
  const int64_t first = job * call.tokens, last = smaller(first + call.tokens, call.rows * call.header.length);
  for (int64_t n = x.sequence_of(first); n < sequences && x.begin(n) < last; ++n) {
    const int64_t begin = x.begin(n) < first ? first : x.begin(n), end = smaller(last, x.end(n));
    if (begin >= end) continue;
    if (way) pull_back_convolution<T, Taps>(x, n, begin, end);
    else convolve<T, Taps>(x, n, begin, end);
  }
  for (int64_t j = 0; j <= x.W && way && call.grad_weight; ++j)
    std::memcpy(static_cast<T*>(call.grad_weight) + (job * (x.W + 1) + j) * x.C, x.sums + j * x.wide, x.C * sizeof(T));
}

template <class T>
static void convolution_of(const ConvolutionCall& call, int64_t way, int64_t job, char* scratch) {
  if (call.taps == 4) return convolution<T, 4>(call, way, job, scratch);
  convolution<T, 0>(call, way, job, scratch);
}

static int64_t convolution_scratch(const void* data, int64_t) {
  const ConvolutionCall& call = *static_cast<const ConvolutionCall*>(data);
  Arena arena{nullptr};
  if (call.wide) Convolution<double>(arena, call);
  else Convolution<float>(arena, call);
  return arena.used;
}

static void convolution_run(const void* data, int64_t way, int64_t job, char* scratch) {
  const ConvolutionCall& call = *static_cast<const ConvolutionCall*>(data);
  if (call.wide) return convolution_of<double>(call, way, job, scratch);
  convolution_of<float>(call, way, job, scratch);
}

}  // namespace innerloop::INNERLOOP_ISA
