// What a layer does to a token or a few beside its memory: linear maps, and gates, number by number. All is float.
#pragma once

#include "activation.h"
#include "call.h"

namespace innerloop::INNERLOOP_ISA {

constexpr int64_t kTokens = 4;  // tokens that share a pass over a weight

// One row of a weight with some tokens. The weight is read as memory has it, one row after another: that is all the time.
template <int Tokens>
static void map_row(const float* weight, const float* x, int64_t width, float* to, int64_t step, bool adds) {
  constexpr int64_t L = kLanes<float>;
  Vec<float> first[Tokens]{}, second[Tokens]{};
  int64_t i = 0;
  for (; i + 2 * L <= width; i += 2 * L) {
    const Vec<float> a = load(weight + i), b = load(weight + i + L);
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
      first[t] += a * load(x + t * width + i);
      second[t] += b * load(x + t * width + i + L);
    }
  }
  for (int t = 0; t < Tokens; ++t) {
    float total = sum_of<float>(first[t] + second[t]);
    for (int64_t j = i; j < width; ++j) total += weight[j] * x[t * width + j];
    to[t * step] = adds ? to[t * step] + total : total;
  }
}

static void map_rows(const float* weight, const float* x, int64_t width, int64_t tokens, float* to, int64_t step,
                     bool adds) {
  while (tokens > 0) {
    switch (tokens) {
      case 1: map_row<1>(weight, x, width, to, step, adds); return;
      case 2: map_row<2>(weight, x, width, to, step, adds); return;
      case 3: map_row<3>(weight, x, width, to, step, adds); return;
      default: map_row<kTokens>(weight, x, width, to, step, adds);
    }
    tokens -= kTokens, x += kTokens * width, to += kTokens * step;
  }
}

// A job is some rows of one of the maps.
static void linear_run(const void* data, int64_t, int64_t job, char*) {
  const LinearCall& call = *static_cast<const LinearCall*>(data);
  int64_t map = 0, jobs;
  while (job >= (jobs = (call.heights[map] + call.share - 1) / call.share)) job -= jobs, ++map;
  const int64_t height = call.heights[map], from = job * call.share, last = smaller(from + call.share, height);
  const float* weight = static_cast<const float*>(call.weights[map]);
  float* to = static_cast<float*>(call.outs[map]);
  for (int64_t n = from; n < last; ++n)
    map_rows(weight + n * call.width, static_cast<const float*>(call.x), call.width, call.tokens, to + n, height,
             call.adds);
}

// One number of a gate. What is rounded to float at the end may well be computed wide.
static float gated(const GateCall& call, int64_t at) {
  const int64_t column = at % call.width;
  const float x = static_cast<const float*>(call.x)[at];
  const float* other = static_cast<const float*>(call.other);
  const double e = std::exp(x < 0 ? double(x) : -double(x)), s = x < 0 ? e / (1 + e) : 1 / (1 + e);
  if (call.kind == kSiluTimes) return float(x * s * (other ? other[at] : 1.0));
  if (call.kind == kSigmoidTimes) return float(call.factor * s);
  const double raised = double(x + other[column]);  // kDecay
  const double step = (raised > 0 ? raised : 0) + std::log1p(std::exp(raised > 0 ? -raised : raised));
  return float(-std::exp(double(static_cast<const float*>(call.rate)[column])) * step);
}

static void gate_run(const void* data, int64_t, int64_t, char*) {
  const GateCall& call = *static_cast<const GateCall*>(data);
  constexpr int64_t L = kLanes<float>;
  const int64_t size = call.tokens * call.width;
  const float *x = static_cast<const float*>(call.x), *other = static_cast<const float*>(call.other);
  float* to = static_cast<float*>(call.out);
  int64_t i = 0;
  for (; call.kind == kSiluTimes && i + L <= size; i += L) {
    const Vec<float> y = activate(load(x + i), kSilu);
    store(to + i, other ? y * load(other + i) : y);
  }
  for (; i < size; ++i) to[i] = gated(call, i);
}

static int64_t no_scratch(const void*, int64_t) { return 64; }

}  // namespace innerloop::INNERLOOP_ISA
