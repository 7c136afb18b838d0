// SiLU and the logistic function with their slopes, a vector at a time.
#pragma once

#include "vector.h"

namespace innerloop::INNERLOOP_ISA {

enum Activation : int64_t { kNone = 0, kSilu = 1, kSigmoid = 2 };

// 1 / (1 + e^-x), by an exponential that cannot overflow.
template <class V>
INNERLOOP_INLINE V sigmoid_of(V x) {
  const V zero{}, decayed = exp_of(x < zero ? x : -x), whole = 1 / (1 + decayed);
  return x < zero ? decayed * whole : whole;
}

template <class V>
INNERLOOP_INLINE V activate(V x, int64_t activation) {
  const V s = sigmoid_of(x);
  return activation == kSilu ? x * s : s;
}

// The function and what its slope is there.
template <class V>
INNERLOOP_INLINE V activate(V x, int64_t activation, V* slope) {
  const V s = sigmoid_of(x), rest = s * (1 - s);
  *slope = activation == kSilu ? s + x * rest : rest;
  return activation == kSilu ? x * s : s;
}

}  // namespace innerloop::INNERLOOP_ISA
