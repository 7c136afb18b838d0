// A whole sequence of one head whose memory fades by channel, chunk after chunk:
//   (I + stril<x, y>) E = D - (x p) S,  O = scale ((q p) S + <q, y> E),  S' = p_C S + (y tail)^T E,
// where nothing is erased E = D; where the value is written at a key of its own, z, D = -stril<x, z> V and V joins E.
#pragma once

#include "channel_token.h"

namespace innerloop::INNERLOOP_ISA::channel {

template <class T>
struct Forward {
  Chunk<T> chunk;
  T *writes, *read, *minus, *row, *state;  // [writes tall, V]; [reads tall, V]; -1 for every token; [V]

  Forward(Arena& arena, const Frame<T>& f) {
    const int64_t tokens = f.tall();
    chunk.take(arena, f, false);
    writes = arena.take<T>(f.writes * tokens * f.step_v), read = arena.take<T>(2 * tokens * f.step_v);
    minus = arena.take<T>(tokens), row = arena.take<T>(f.step_v), state = arena.take<T>(f.K * f.step_v);
    if (minus) fill(minus, T(-1), tokens);
  }
};

// From values to what is written. `asked`: what x reads of the memory of the chunk's start, if that is not empty.
template <class T>
static void correct(const Chunk<T>& c, const Frame<T>& f, T* writes, const T* asked, int64_t step, const T* minus) {
  if (f.reads == 1) return;
  const bool apart = f.writes == 2;
  for (int64_t t = 0; t < c.size; ++t) {
    T* to = writes + t * f.step_v;
    for (int64_t i = 0; i < f.wide_v; i += kLanes<T>) {
      const Vec<T> wanted = apart ? Vec<T>{} : load(to + i);
      store(to + i, asked ? wanted - load(asked + t * step + i) : wanted);
    }
  }
  const Left<T> gram{c.asked_gram(f), c.gram_step(f)};
  if (apart)
    product<T>({gram.data + c.tall, gram.step}, c.size, {writes + c.tall * f.step_v, f.step_v}, f.wide_v, c.size,
               {writes, f.step_v, writes, nullptr, 0, minus}, Part::lower_left);
  solve<T, false>(gram.data, gram.step, writes, f.step_v, c.size, f.wide_v);
}

// after = p_C before + (y tail)^T W; no before: zeros.
template <class T>
static void remember(const Chunk<T>& c, const Frame<T>& f, const T* writes, const T* before, T* after) {
  const Into<T> into{after, f.step_v, before, before ? c.whole(f) : nullptr, 1, nullptr};
  product<T>({c.turned, f.step_c}, f.K, {writes, f.step_v}, f.wide_v, f.writes * c.tall, into);
}

// O, which begins at x.read and has x's rows between its own.
template <class T>
static void read_out(Forward<T>& x, const Frame<T>& f, int64_t begin, const T* writes, bool empty) {
  const Chunk<T>& c = x.chunk;
  const int64_t step = c.reads * f.step_v;
  for (int64_t n = 0; n < f.writes; ++n)
    product<T>({c.grams + n * c.tall, c.gram_step(f)}, c.size, {writes + n * c.tall * f.step_v, f.step_v}, f.wide_v,
               c.size, {x.read, step, empty && n == 0 ? nullptr : x.read}, Part::lower_left);
  for (int64_t t = 0; t < c.size; ++t) {
    T* row = x.read + t * step;
    multiply(row, row, T(f.call.scale), f.wide_v);
    write_row(row, f.V, f.call.out, f.place(begin + t) * f.V, f.call.v.element);
  }
}

template <class T>
static void forward_chunk(Forward<T>& x, const Frame<T>& f, int64_t begin, int64_t size, T* writes, const T* before,
                          T* after) {
  Chunk<T>& c = x.chunk;
  c.begin(f, size, true, false);
  fade_chunk<T>(c, f, begin, c.rows, nullptr);
  if (before) product<T>({c.rows, f.step_k}, c.reads * size, {before, f.step_v}, f.wide_v, f.K, {x.read, f.step_v});
  read_values(c, f, begin, writes, x.row);
  correct<T>(c, f, writes, before ? x.read + f.step_v : nullptr, c.reads * f.step_v, x.minus);
  read_out(x, f, begin, writes, !before);
  if (after) remember<T>(c, f, writes, before, after);
}

template <class T>
static void forward(const ChannelCall& call, int64_t job, char* scratch) {
  const Frame<T> f(call, job);
  Arena arena{scratch};
  Forward<T> x(arena, f);
  if (f.end - f.begin == 1) return token(x.chunk, f, x.writes, x.read);
  const Trail<T> trail = call.trail ? Trail<T>::of_call(f) : Trail<T>{x.state, 0, x.writes - x.state};
  const int64_t chunks = f.chunks();
  const T* before = nullptr;
  if (call.state) {
    T* first = chunks ? trail.state(0) : x.state;
    read_state(f, call.state, first);
    before = first;
  }
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = f.begin + i * f.C;
    T* after = i + 1 < chunks ? trail.state(i + 1) : call.final ? x.state : nullptr;
    x.chunk.turns = {f.span(i), f.span(i + 1)};
    forward_chunk(x, f, begin, smaller(f.C, f.end - begin), trail.update(i), before, after);
    before = after;
  }
  if (call.final) write_state(f, before, call.final);
}

template <class T>
static int64_t forward_scratch(const ChannelCall& call) {
  const Frame<T> f(call, 0);
  Arena arena{nullptr};
  Forward<T> x(arena, f);
  return arena.used;
}

}  // namespace innerloop::INNERLOOP_ISA::channel
