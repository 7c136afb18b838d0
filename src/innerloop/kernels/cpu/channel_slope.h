// The gradient of faded products: from that of the products, of rows since the chunk's start and of columns to its end,
// to that of rows and columns as given and of log w. Every term of a channel's log w passes through that w, so nothing
// large cancels and what a zero stops is zero to the bit.
#pragma once

#include "channel_decay.h"

namespace innerloop::INNERLOOP_ISA::channel {

template <class T>
struct Slope {
  T* given;            // rows as they came
  T* saved_rows;       // [levels][tall reads, K]: a pair's later rows before they joined
  T *behind, *saved_columns;  // [writes tall, K] columns faded to the chunk's end; [levels] of earlier ones before that
  T* grams;            // as the products lie
  T *rows, *columns;   // as the chunk's rows and columns lie
  T* decay;            // [tall, K]: of log w
  T* through;          // [blocks, K]: what passes through a whole block

  void take(Arena& arena, const Frame<T>& f) {
    const int64_t tokens = f.tall(), reads = tokens * f.reads * f.step_k, writes = tokens * f.writes * f.step_k;
    given = arena.take<T>(reads), saved_rows = arena.take<T>(f.levels * reads);
    behind = arena.take<T>(writes), saved_columns = arena.take<T>(f.levels * writes);
    grams = arena.take<T>(tokens * f.reads * f.step_c);
    rows = arena.take<T>(reads), columns = arena.take<T>(writes);
    decay = arena.take<T>(tokens * f.step_k), through = arena.take<T>(f.blocks * f.step_k);
  }
};

// A block's columns as they leave it.
template <class T>
static void fade_columns(const T* given, const T* keep, int64_t step, int64_t channels, T* columns) {
  for (int64_t i = 0; i < channels; i += kLanes<T>) {
    Vec<T> left = splat(T(1));
    for (int64_t t = kBlock<T> - 1; t >= 0; --t) {
      store(columns + t * step + i, load(given + t * step + i) * left);
      left *= load(keep + t * step + i);
    }
  }
}

// What fade_chunk does to turned columns, to columns that lie as rows; the spans are there.
template <class T>
static void fade_behind(const Chunk<T>& c, const Frame<T>& f, T* behind, T* saved) {
  constexpr int64_t block = kBlock<T>;
  const int64_t count = f.tall() * f.writes * f.step_k;
  for (int64_t n = 0; n < f.writes; ++n) {
    T* columns = behind + n * c.tall * f.step_k;
    for (int64_t b = 0; b < c.blocks; ++b)
      fade_columns(c.columns + (n * c.tall + b * block) * f.step_k, c.keep + b * block * f.step_k, f.step_k, f.wide_k,
                   columns + b * block * f.step_k);
    for (int64_t level = 0; int64_t(1) << level < c.blocks; ++level)
      for_level(level, c.blocks, [&](const Pair& pair) {
        const int64_t at = pair.first * block * f.step_k, some = (pair.middle - pair.first) * block;
        T* before = saved + level * count + n * c.tall * f.step_k + at;
        std::memcpy(before, columns + at, some * f.step_k * sizeof(T));
        fade_all(columns + at, columns + at, some, f.step_k, c.spans + (level * f.blocks + pair.middle) * f.step_k,
                 f.wide_k);
      });
  }
}

// grad *= factor, and what that says of log factor: the sum of grad * value.
template <class T>
static void pull_back_fade(T* grad, const T* value, int64_t rows, int64_t step, const T* factor, int64_t channels,
                           T* sum) {
  for (int64_t i = 0; i < channels; i += kLanes<T>) {
    const Vec<T> fade = load(factor + i);
    Vec<T> total = load(sum + i);
    for (int64_t t = 0; t < rows; ++t) {
      const Vec<T> slope = load(grad + t * step + i) * fade;
      store(grad + t * step + i, slope);
      total += slope * load(value + t * step + i);
    }
    store(sum + i, total);
  }
}

// Through all blocks from first to last passes what was summed up in the first of `sums`.
template <class T>
static void spread_through(T* through, int64_t first, int64_t last, int64_t step, const T* sum, int64_t channels) {
  for (int64_t b = first; b < last; ++b)
    for (int64_t i = 0; i < channels; i += kLanes<T>)
      store(through + b * step + i, load(through + b * step + i) + load(sum + i));
}

// Take a pair apart: rows of the later one had faded by all that the earlier keeps, and the other way round.
template <class T>
static void pull_apart(const Slope<T>& s, const Chunk<T>& c, const Frame<T>& f, const Pair& pair, T* sum) {
  constexpr int64_t block = kBlock<T>;
  const int64_t row = pair.middle * block * c.reads, rows = (pair.last - pair.middle) * block * c.reads;
  const int64_t column = pair.first * block, columns = (pair.middle - pair.first) * block;
  const T* spans = c.spans + pair.level * f.blocks * f.step_k;
  const T* saved_rows = s.saved_rows + (pair.level * f.tall() * f.reads + row) * f.step_k;
  T* late = s.rows + row * f.step_k;
  fill(sum, T(0), f.wide_k);
  pull_back_fade(late, saved_rows, rows, f.step_k, spans + pair.first * f.step_k, f.wide_k, sum);
  spread_through(s.through, pair.first, pair.middle, f.step_k, sum, f.wide_k);
  fill(sum, T(0), f.wide_k);
  for (int64_t n = 0; n < f.writes; ++n) {
    const int64_t at = n * c.tall + column;
    const T* saved = s.saved_columns + (pair.level * f.tall() * f.writes + at) * f.step_k;
    const T* gram = s.grams + row * f.step_c + at;
    T* early = s.columns + at * f.step_k;
    pull_back_fade(early, saved, columns, f.step_k, spans + pair.middle * f.step_k, f.wide_k, sum);
    product<T>({gram, f.step_c}, rows, {saved, f.step_k}, f.wide_k, columns, {late, f.step_k, late});
    product<T>({gram, f.step_c, true}, columns, {saved_rows, f.step_k}, f.wide_k, rows, {early, f.step_k, early});
  }
  spread_through(s.through, pair.middle, pair.last, f.step_k, sum, f.wide_k);
}

// What rows of a block read of all that was there before it.
template <class T, bool Ask, bool Early>
static void pull_back_carry(const T* given, const T* keep, int64_t step, int64_t channels, const T* through, T* rows,
                            T* decay) {
  constexpr int64_t reads = 1 + Ask;
  for (int64_t i = 0; i < channels; i += kLanes<T>) {
    Vec<T> since = splat(T(1)), passed[kBlock<T>], total = load(through + i);
    for (int64_t t = 0; t < kBlock<T>; ++t) {
      const int64_t q = t * reads * step + i, x = q + step;
      const Vec<T> before = since;
      since *= load(keep + t * step + i);
      const Vec<T> slope = load(rows + q) * since;
      store(rows + q, slope);
      passed[t] = slope * load(given + q);
      if (!Ask) continue;
      const Vec<T> asked = load(rows + x) * (Early ? before : since);
      store(rows + x, asked);
      if (!Early) passed[t] += asked * load(given + x);
      else if (t > 0) passed[t - 1] += asked * load(given + x);
    }
    for (int64_t t = kBlock<T> - 1; t >= 0; --t) {
      total += passed[t];
      store(decay + t * step + i, total);
    }
  }
}

// One vector of channels of a block: where its rows and columns begin, and how columns faded from token to token.
template <class T>
struct Pairs {
  const T *given, *keep, *columns, *grams;  // rows, e^g, columns; gradients of their products, q's and under it x's
  T *rows, *grads, *decay;                  // gradients of rows, columns and log w
  int64_t step, step_c;
  Vec<T> faded[kBlock<T>][kBlock<T>];
};

// What rows read of columns, which fade on the way.
template <class T, bool Ask, bool Early>
INNERLOOP_INLINE void pull_back_reads(Pairs<T>& p) {
  constexpr int block = kBlock<T>, reads = 1 + Ask;
  Vec<T> column[block];
#pragma GCC unroll 16
  for (int t = 0; t < block; ++t) {
    const T *q = p.grams + t * reads * p.step_c, *x = q + p.step_c;
    T *to = p.rows + t * reads * p.step, *asked = to + p.step;
    const Vec<T> fade = load(p.keep + t * p.step);
    Vec<T> by_q = load(to), by_x = Ask ? load(asked) : by_q;
    column[t] = load(p.columns + t * p.step);
#pragma GCC unroll 16
    for (int s = 0; s < block; ++s) {
      if (s > t) continue;
      if (Ask && Early && s < t) by_x += column[s] * x[s];
      if (s < t) p.faded[t][s] = column[s] = column[s] * fade;
      by_q += column[s] * q[s];
      if (Ask && !Early && s < t) by_x += column[s] * x[s];
    }
    store(to, by_q);
    if (Ask) store(asked, by_x);
  }
}

// What columns gave to rows and to what lies behind the block, back in time; and what that says of the fading.
template <class T, bool Ask, bool Early>
INNERLOOP_INLINE void pull_back_columns(Pairs<T>& p) {
  constexpr int block = kBlock<T>, reads = 1 + Ask;
  Vec<T> column[block];
#pragma GCC unroll 16
  for (int s = 0; s < block; ++s) column[s] = load(p.grads + s * p.step);
#pragma GCC unroll 16
  for (int back = 0; back < block; ++back) {
    const int t = block - 1 - back;
    const T *q = p.grams + t * reads * p.step_c, *x = q + p.step_c, *row = p.given + t * reads * p.step;
    const Vec<T> fade = load(p.keep + t * p.step), query = load(row), asking = Ask ? load(row + p.step) : query;
    Vec<T> total = load(p.decay + t * p.step);
#pragma GCC unroll 16
    for (int s = 0; s < block; ++s) {
      if (s > t) continue;
      column[s] += query * q[s];
      if (s == t) continue;
      if (Ask && !Early) column[s] += asking * x[s];
      total += p.faded[t][s] * column[s];
      column[s] *= fade;
      if (Ask && Early) column[s] += asking * x[s];
    }
    store(p.grads + t * p.step, column[t]);
    store(p.decay + t * p.step, total);
  }
}

// What a block's tokens read of its own columns, the n-th of each.
template <class T, bool Ask, bool Early>
static void pull_back_pairs(const Slope<T>& s, const Chunk<T>& c, const Frame<T>& f, int64_t b, int64_t n) {
  const int64_t row = b * kBlock<T> * c.reads, key = b * kBlock<T> * f.step_k, column = n * c.tall + b * kBlock<T>;
  for (int64_t i = 0; i < f.wide_k; i += kLanes<T>) {
    Pairs<T> p{s.given + row * f.step_k + i, c.keep + key + i, c.columns + column * f.step_k + i,
               s.grams + row * f.step_c + column, s.rows + row * f.step_k + i, s.columns + column * f.step_k + i,
               s.decay + key + i, f.step_k, f.step_c, {}};
    pull_back_reads<T, Ask, Early>(p);
    pull_back_columns<T, Ask, Early>(p);
  }
}

template <class T, bool Ask, bool Early>
static void pull_back_blocks(const Slope<T>& s, const Chunk<T>& c, const Frame<T>& f) {
  for (int64_t b = 0; b < c.blocks; ++b) {
    const int64_t row = b * kBlock<T> * c.reads * f.step_k, key = b * kBlock<T> * f.step_k;
    pull_back_carry<T, Ask, Early>(s.given + row, c.keep + key, f.step_k, f.wide_k, s.through + b * f.step_k,
                                   s.rows + row, s.decay + key);
    for (int64_t n = 0; n < f.writes; ++n) pull_back_pairs<T, Ask, Early>(s, c, f, b, n);
  }
}

// From s.grams, s.rows, s.columns and s.through, in place, to the gradients of rows, columns and log w as given.
template <class T>
static void pull_back_products(const Slope<T>& s, const Chunk<T>& c, const Frame<T>& f, T* sum) {
  for (int64_t level = f.level_of(c.blocks) - 1; level >= 0; --level)
    for_level(level, c.blocks, [&](const Pair& pair) { pull_apart(s, c, f, pair, sum); });
  if (f.reads == 1) return pull_back_blocks<T, false, false>(s, c, f);
  if (f.call.kind == kGeneralized) return pull_back_blocks<T, true, true>(s, c, f);
  pull_back_blocks<T, true, false>(s, c, f);
}

}  // namespace innerloop::INNERLOOP_ISA::channel
