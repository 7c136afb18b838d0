// Rows made unit length, or unit root mean square, with a weight for each column and a gate before or after:
//   y = w r x f(z)  with r = 1 / sqrt(mean(x^2) + eps), or the gate first:  y = w r h,  h = x f(z).
#pragma once

#include "activation.h"
#include "chunk.h"

namespace innerloop::INNERLOOP_ISA {

enum Measure : int64_t { kMean = 0, kSum = 1, kFloor = 2 };  // kFloor: r = 1 / max(|x|, eps)

template <class T>
struct Norm {
  const NormCall& call;
  int64_t D, wide;
  T *weight, *sums;                // [D]: and the weight's gradient
  T *x, *gate, *factor, *by_gate;  // [D]: a row, its gate, f of that, and f's slope
  T *normed, *grad;                // [D]

  Norm(Arena& arena, const NormCall& c) : call(c), D(c.width), wide(padded<T>(c.width)) {
    T** const rows[] = {&weight, &sums, &x, &gate, &factor, &by_gate, &normed, &grad};
    for (T** row : rows) *row = arena.take<T>(wide);
    if (!arena.memory) return;
    for (int64_t i = 0; i < wide; ++i) weight[i] = i < D, sums[i] = 0;
    if (call.weight) std::memcpy(weight, call.weight, D * sizeof(T));
  }
};

// Where a row stands, from one to the next: a row is so short that divisions would take as long as all the rest.
struct RowPlace {
  int64_t heads, length, row, token, head;

  RowPlace(const NormCall& call, int64_t first) : heads(call.heads), length(call.header.length) {
    head = first % heads, token = first / heads % length, row = first / heads / length;
  }
  void next() {
    if (++head < heads) return;
    head = 0;
    if (++token < length) return;
    token = 0, ++row;
  }
  int64_t in(const Strided& x) const { return row * x.row + token * x.token + head * x.head; }
};

// Read a row and its gate, norm it, and return by what it was multiplied.
template <class T>
static T norm_row(Norm<T>& n, const RowPlace& place, bool slopes) {
  const NormCall& call = n.call;
  const bool gated = call.gate.data, first = gated && call.gate_first;
  const int64_t wide = n.wide, activation = call.activation;
  T *normed = n.normed, *factor = n.factor, *by_gate = n.by_gate, *gate = n.gate, *x = n.x;
  read_row(call.x, place.in(call.x), n.D, first ? x : normed);
  if (gated) {
    read_row(call.gate, place.in(call.gate), n.D, gate);
    for (int64_t i = 0; i < wide; i += kLanes<T>) {
      Vec<T> slope;
      store(factor + i, activate(load(gate + i), activation, &slope));
      if (slopes) store(by_gate + i, slope);
    }
  }
  for (int64_t i = 0; i < wide && first; i += kLanes<T>) store(normed + i, load(x + i) * load(factor + i));
  const T total = dot(normed, normed, wide), eps = T(call.eps), length = std::sqrt(total);
  T r = 1 / (length < eps ? eps : length);
  if (call.measure != kFloor) r = 1 / std::sqrt((call.measure == kMean ? total / T(n.D) : total) + eps);
  for (int64_t i = 0; i < wide; i += kLanes<T>) store(normed + i, load(normed + i) * r);
  return r;
}

template <class T>
static void norm_forward(Norm<T>& n, const RowPlace& place, int64_t row) {
  norm_row(n, place, false);
  const bool then = n.call.gate.data && !n.call.gate_first;
  const int64_t wide = n.wide;
  T *normed = n.normed, *weight = n.weight, *factor = n.factor;
  for (int64_t i = 0; i < wide; i += kLanes<T>) {
    const Vec<T> y = load(normed + i) * load(weight + i);
    store(normed + i, then ? y * load(factor + i) : y);
  }
  write_row(normed, n.D, n.call.out, row * n.D, n.call.x.element);
}

// From the gradient of what was normed to that of what came in: r (g - y (y . g)), the mean's by the width.
template <class T>
static void pull_back_length(Norm<T>& n, T r) {
  const int64_t wide = n.wide;
  T *grad = n.grad, *normed = n.normed;
  T along = dot(grad, normed, wide);
  if (n.call.measure == kMean) along /= T(n.D);
  if (n.call.measure == kFloor && r * T(n.call.eps) >= 1) along = 0;
  for (int64_t i = 0; i < wide; i += kLanes<T>) store(grad + i, (load(grad + i) - load(normed + i) * along) * r);
}

template <class T>
static void norm_backward(Norm<T>& n, const RowPlace& place, int64_t row) {
  const NormCall& call = n.call;
  const T r = norm_row(n, place, true);
  const bool gated = call.gate.data, first = gated && call.gate_first, then = gated && !call.gate_first;
  const int64_t wide = n.wide;
  T *grad = n.grad, *normed = n.normed, *weight = n.weight, *sums = n.sums, *gate = n.gate;
  const T *factor = n.factor, *by_gate = n.by_gate, *x = n.x;
  read_row(call.grad_out, place.in(call.grad_out), n.D, grad);
  for (int64_t i = 0; i < wide; i += kLanes<T>) {
    Vec<T> slope = load(grad + i);
    const Vec<T> y = load(normed + i), w = load(weight + i);
    if (then) {
      store(gate + i, slope * y * w * load(by_gate + i));
      slope *= load(factor + i);
    }
    store(sums + i, load(sums + i) + slope * y);
    store(grad + i, slope * w);
  }
  pull_back_length(n, r);
  for (int64_t i = 0; i < wide && first; i += kLanes<T>) {
    const Vec<T> slope = load(grad + i);
    store(gate + i, slope * load(x + i) * load(by_gate + i));
    store(grad + i, slope * load(factor + i));
  }
  if (call.grad_x) write_row(grad, n.D, call.grad_x, row * n.D, call.x.element);
  if (call.grad_gate) write_row(gate, n.D, call.grad_gate, row * n.D, call.gate.element);
}

template <class T>
static void norm_of(const NormCall& call, int64_t way, int64_t job, char* scratch) {
  Arena arena{scratch};
  Norm<T> n(arena, call);
  const int64_t first = job * call.share, last = smaller(first + call.share, call.rows);
  RowPlace place(call, first);
  for (int64_t row = first; row < last; ++row, place.next())
    if (way) norm_backward(n, place, row);
    else norm_forward(n, place, row);
  if (way && call.grad_weight) std::memcpy(static_cast<T*>(call.grad_weight) + job * n.D, n.sums, n.D * sizeof(T));
}

static int64_t norm_scratch(const void* data, int64_t) {
  const NormCall& call = *static_cast<const NormCall*>(data);
  Arena arena{nullptr};
  if (call.wide) Norm<double>(arena, call);
  else Norm<float>(arena, call);
  return arena.used;
}

static void norm_run(const void* data, int64_t way, int64_t job, char* scratch) {
  const NormCall& call = *static_cast<const NormCall*>(data);
  if (call.wide) return norm_of<double>(call, way, job, scratch);
  norm_of<float>(call, way, job, scratch);
}

}  // namespace innerloop::INNERLOOP_ISA
