// A whole sequence of one head, chunk after chunk:
//   (I + beta P stril(K K^T)) U = beta (V - p K S),  O = scale (p Q S + (P Q K^T) U),  S' = p_C S + (P_C K)^T U.
#pragma once

#include "token.h"

namespace innerloop::INNERLOOP_ISA {

template <class T>
struct Forward {
  Chunk<T> chunk;
  T *update, *faded, *state;

  Forward(Arena& arena, const Frame<T>& f) {
    chunk.take(arena, f);
    update = arena.take<T>(f.C * f.step_v), faded = arena.take<T>(f.C * f.step_v);
    state = nullptr;
  }
};

// One chunk, with its outputs; returns the memory after it, which lies where `x.state` does.
template <class T>
static void forward_chunk(Forward<T>& x, const Frame<T>& f, int64_t begin, int64_t size, bool empty, bool last) {
  Chunk<T>& chunk = x.chunk;
  read_tokens(chunk, f, begin, size, true);
  read_values(f, begin, size, x.update);
  fill_coefficients(chunk, f, size, true);
  const int64_t asked = f.call.corrects ? 2 * size : size;
  T* read = chunk.read;
  if (!empty) product<T>({chunk.qk, f.step_k}, asked, {x.state, f.step_v}, f.wide_v, f.K, {read, f.step_v});
  correct<T>(chunk, f, size, x.update, empty ? nullptr : read + size * f.step_v);
  const Into<T> into{read, f.step_v, empty ? nullptr : read, empty ? nullptr : chunk.scaled_carry, 1, nullptr};
  product<T>({chunk.scores, f.step_c}, size, {x.update, f.step_v}, f.wide_v, size, into, Part::lower_left);
  for (int64_t t = 0; t < size; ++t)
    write_row(read + t * f.step_v, f.V, f.call.out, f.place(begin + t) * f.V, f.call.v.element);
  if (!last || f.call.final) remember<T>(chunk, f, size, x.update, x.faded, empty ? nullptr : x.state, x.state);
}

// Heads go side by side from chunk to chunk: what lies together in memory is read together.
template <class T>
static void forward(const ScalarCall& call, int64_t job, char* scratch) {
  Arena arena{scratch};
  Forward<T> x(arena, Frame<T>(call, 0, 0));
  const Share share(call, job);
  T* states[kTogether];
  for (int64_t i = 0; i < share.heads; ++i) {
    const Frame<T> f(call, share.sequence, share.head + i);
    if (f.end - f.begin == 1) token(x.chunk, f);
    states[i] = arena.take<T>(f.K * f.step_v);
    if (call.state) read_state(f, call.state, states[i]);
  }
  const Frame<T> any(call, share.sequence, share.head);
  if (any.end - any.begin == 1) return;
  for (int64_t begin = any.begin; begin < any.end; begin += any.C)
    for (int64_t i = 0; i < share.heads; ++i) {
      const Frame<T> f(call, share.sequence, share.head + i);
      const int64_t size = smaller(f.C, f.end - begin);
      x.state = states[i];
      forward_chunk(x, f, begin, size, begin == f.begin && !call.state, begin + size == f.end);
    }
  for (int64_t i = 0; i < share.heads && call.final; ++i)
    write_state(Frame<T>(call, share.sequence, share.head + i), any.begin == any.end && !call.state ? nullptr : states[i], call.final);
}

template <class T>
static int64_t forward_scratch(const ScalarCall& call) {
  const Frame<T> f(call, 0, 0);
  Arena arena{nullptr};
  Forward<T> x(arena, f);
  for (int64_t i = 0; i < kTogether; ++i) arena.take<T>(f.K * f.step_v);
  return arena.used;
}

}  // namespace innerloop::INNERLOOP_ISA
