// A whole sequence of one head, chunk after chunk:
//   (I + beta P stril(K K^T)) U = beta (V - p K S),  O = scale (p Q S + (P Q K^T) U),  S' = p_C S + (P_C K)^T U.
#pragma once

#include "pairs.h"
#include "token.h"

namespace innerloop::INNERLOOP_ISA {

template <class T>
struct Forward {
  Chunk<T> chunk;
  T *update, *faded;
  T* states[kTogether];
  Pairs pairs;

  Forward(Arena& arena, const Frame<T>& f) {
    chunk.take(arena, f);
    update = arena.take<T>(f.C * f.step_v), faded = arena.take<T>(f.C * f.step_v);
    for (T*& state : states) state = arena.take<T>(f.K * f.step_v);
    if constexpr (sizeof(T) == sizeof(float))
      if (paired(f.call)) pairs.take(arena, f);
  }
};

// All of a chunk that its values have no part in.
template <class T>
static void prepare_chunk(Forward<T>& x, const Frame<T>& f, int64_t begin, int64_t size, const T* before) {
  Chunk<T>& chunk = x.chunk;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (paired(f.call)) {
      read_tokens(x.pairs, chunk, f, begin, size);
      fill_coefficients(x.pairs, chunk, f, size);
      if (before) ask_memory(x.pairs, chunk, f, size, before);
      return;
    }
  }
  read_tokens(chunk, f, begin, size, true);
  fill_coefficients(chunk, f, size, true);
  const int64_t asked = f.call.corrects ? 2 * size : size;
  if (before) product<T>({chunk.qk, f.step_k}, asked, {before, f.step_v}, f.wide_v, f.K, {chunk.read, f.step_v});
}

// One chunk, with its outputs: from the memory before (none: empty) to the one after (none: nobody asks).
template <class T>
static void forward_chunk(Forward<T>& x, const Frame<T>& f, int64_t begin, int64_t size, T* update, const T* before,
                          T* after) {
  Chunk<T>& chunk = x.chunk;
  T* read = chunk.read;
  read_values(chunk.turns, f, f.call.v, begin, size, update);
  prepare_chunk(x, f, begin, size, before);
  correct<T>(chunk, f, size, update, before ? read + size * f.step_v : nullptr);
  const Into<T> into{read, f.step_v, before ? read : nullptr, before ? chunk.scaled_carry : nullptr, 1, nullptr};
  product<T>({chunk.scores, f.step_c}, size, {update, f.step_v}, f.wide_v, size, into, Part::lower_left);
  for (int64_t t = 0; t < size; ++t)
    write_row(read + t * f.step_v, f.V, f.call.out, f.place(begin + t) * f.V, f.call.v.element);
  if (after) remember<T>(chunk, f, size, update, x.faded, before, after);
}

// Chunk i of one head. Memories that a trail keeps go into it, the others into one that is changed in place.
template <class T>
static void forward_turn(Forward<T>& x, const Frame<T>& f, int64_t i, T* state) {
  const int64_t begin = f.begin + i * f.C, size = smaller(f.C, f.end - begin);
  const bool empty = i == 0 && !f.call.state, last = begin + size == f.end;
  const Trail<T> trail = f.call.trail ? Trail<T>::of_call(f) : Trail<T>{};
  T* before = f.call.trail && trail.keeps(i) ? trail.state(i) : state;
  T* after = last && !f.call.final ? nullptr : last || !f.call.trail || !trail.keeps(i + 1) ? state : trail.state(i + 1);
  if (i == 0 && f.call.state) read_state(f, f.call.state, before);
  forward_chunk<T>(x, f, begin, size, f.call.trail ? trail.update(i) : x.update, empty ? nullptr : before, after);
  if (last && f.call.final) write_state(f, state, f.call.final);
}

// Heads go side by side from chunk to chunk: what lies together in memory is read together.
template <class T>
static void forward(const ScalarCall& call, int64_t job, char* scratch) {
  const Share share(call, job);
  Arena arena{scratch};
  const Frame<T> first(call, share.sequence, share.head);
  Forward<T> x(arena, first);
  const int64_t chunks = first.chunks();
  for (int64_t i = 0; i < chunks; ++i)
    for (int64_t n = 0; n < share.heads; ++n) {
      const Frame<T> f(call, share.sequence, share.head + n);
      const bool alone = f.end - f.begin == 1;
      x.chunk.turns = {f.span(i), share.after(f, i, n, 1)};
      if (!alone || call.trail) forward_turn(x, f, i, x.states[n]);
      if (alone) token(x.chunk, f);  // one token gives the same bits in a packed call as by itself
    }
  for (int64_t n = 0; n < share.heads && chunks == 0 && call.final; ++n) {
    const Frame<T> f(call, share.sequence, share.head + n);
    if (call.state) read_state(f, call.state, x.states[n]);
    write_state(f, call.state ? x.states[n] : nullptr, call.final);
  }
}

template <class T>
static int64_t forward_scratch(const ScalarCall& call) {
  Arena arena{nullptr};
  Forward<T> x(arena, Frame<T>(call, 0, 0));
  return arena.used;
}

}  // namespace innerloop::INNERLOOP_ISA
