// Products of rows and columns whose channels fade on the way, by running products alone:
//   <x_t, y_s> = sum_c x_tc y_sc prod_{s < i <= t} w_ic,  or up to t - 1 where x reads the memory before it fades.
// Within a block one token after another fades the columns, which lie turned, a vector of them for a channel. Blocks
// join by pairs: a row carries what is kept since its block's start, a column what is left at its block's end, and what
// lies between two neighbours is one product.
#pragma once

#include "channel_chunk.h"

namespace innerloop::INNERLOOP_ISA::channel {

constexpr int kGroup = 4;  // tokens whose sums are held in registers at once

// The first lanes of x, and of `rest` the others.
template <class T, int Count>
INNERLOOP_INLINE Vec<T> first_lanes(Vec<T> x, Vec<T> rest) {
  constexpr int n = kLanes<T>;
  if constexpr (Count <= 0) return rest;
  if constexpr (Count >= n) return x;
  typename Lanes<T>::bits from{};
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) from[i] = i < Count ? i : n + i;
  return __builtin_shuffle(x, rest, from);
}

// One channel of some tokens: lanes are columns, the first Before of which came before the first of these tokens.
template <class T, bool Query, bool Ask, bool Early, int Before, int I = 0>
INNERLOOP_INLINE void pass(Vec<T>& column, Vec<T> (&sum)[kGroup][2], const T* rows, const T* keep, int64_t step) {
  const T* row = rows + I * (Query + Ask) * step;
  if constexpr (Ask && Early) sum[I][1] += column * row[Query * step];
  if constexpr (Before + I > 0) column *= first_lanes<T, Before + I>(splat(keep[I * step]), splat(T(1)));
  if constexpr (Query) sum[I][0] += column * row[0];
  if constexpr (Ask && !Early) sum[I][1] += column * row[Query * step];
  if constexpr (I + 1 < kGroup) pass<T, Query, Ask, Early, Before, I + 1>(column, sum, rows, keep, step);
}

template <class T, bool Query, bool Ask, int Before, int I = 0>
INNERLOOP_INLINE void put_sums(const Vec<T> (&sum)[kGroup][2], T* gram, int64_t step) {
  T* to = gram + I * (Query + Ask) * step;
  if constexpr (Query) store(to, first_lanes<T, Before + I + 1>(sum[I][0], Vec<T>{}));
  if constexpr (Ask) store(to + Query * step, first_lanes<T, Before + I>(sum[I][1], Vec<T>{}));
  if constexpr (I + 1 < kGroup) put_sums<T, Query, Ask, Before, I + 1>(sum, gram, step);
}

// All groups of a block that see a vector of its columns, in turn.
template <class T, bool Query, bool Ask, bool Early, int64_t At = 0>
static void pass_block(const T* rows, const T* keep, int64_t step, int64_t channels, T* turned, T* gram,
                       int64_t step_c) {
  constexpr int64_t groups = kBlock<T> / kGroup, token = At % groups * kGroup, lane = At / groups * kLanes<T>;
  constexpr int before = token - lane;
  if constexpr (before + kGroup > 0) {
    Vec<T> sum[kGroup][2] = {};
    const T *some = rows + token * (Query + Ask) * step, *kept = keep + token * step;
    for (int64_t c = 0; c < channels; ++c) {
      T* at = turned + c * step_c + lane;
      Vec<T> column = load(at);
      pass<T, Query, Ask, Early, before>(column, sum, some + c, kept + c, step);
      store(at, column);
    }
    put_sums<T, Query, Ask, before>(sum, gram + token * (Query + Ask) * step_c + lane, step_c);
  }
  if constexpr (lane + kLanes<T> < kBlock<T> || token + kGroup < kBlock<T>)
    pass_block<T, Query, Ask, Early, At + 1>(rows, keep, step, channels, turned, gram, step_c);
}

// Let a block's rows fade since its start, from the rows as given, and keep what the block keeps.
template <class T, bool Query, bool Ask, bool Early>
static void fade_rows(const T* given, const T* keep, int64_t step, int64_t channels, T* rows, T* kept) {
  for (int64_t i = 0; i < channels; i += kLanes<T>) {
    Vec<T> since = splat(T(1));
    for (int64_t t = 0; t < kBlock<T>; ++t) {
      const int64_t q = t * (Query + Ask) * step + i, x = q + Query * step;
      if (Ask && Early) store(rows + x, load(given + x) * since);
      since *= load(keep + t * step + i);
      if (Query) store(rows + q, load(given + q) * since);
      if (Ask && !Early) store(rows + x, load(given + x) * since);
    }
    store(kept + i, since);
  }
}

template <class T, bool Query, bool Ask, bool Early>
static void fade_block(Chunk<T>& c, const Frame<T>& f, int64_t b, const T* given) {
  constexpr int64_t block = kBlock<T>;
  const int64_t row = b * block * c.reads;
  const T *keep = c.kept(f, b), *some = given + row * f.step_k;
  for (int64_t n = 0; n < f.writes; ++n) {
    const int64_t column = n * c.tall + b * block;
    T *turned = c.turned + column, *gram = c.grams + row * f.step_c + column;
    transpose(c.written(f, n, b), f.step_k, block, f.wide_k, turned, f.step_c);
    pass_block<T, Query, Ask, Early>(some, keep, f.step_k, f.K, turned, gram, f.step_c);
  }
  fade_rows<T, Query, Ask, Early>(some, keep, f.step_k, f.wide_k, c.rows + row * f.step_k, c.spans + b * f.step_k);
}

template <class T>
static void fade_block_of(Chunk<T>& c, const Frame<T>& f, int64_t b, const T* given) {
  const bool query = c.reads == f.reads, early = f.call.kind == kGeneralized;
  if (f.reads == 1) return query ? fade_block<T, true, false, false>(c, f, b, given)
                                 : fade_block<T, false, false, false>(c, f, b, given);
  if (query) return early ? fade_block<T, true, true, true>(c, f, b, given)
                          : fade_block<T, true, true, false>(c, f, b, given);
  return early ? fade_block<T, false, true, true>(c, f, b, given) : fade_block<T, false, true, false>(c, f, b, given);
}

// Neighbours of a level: blocks first to middle, and middle to last.
struct Pair {
  int64_t level, first, middle, last;
};

// Call `visit` for every pair of a chunk, from level to level; upwards, or downwards for gradients.
template <class Visit>
INNERLOOP_INLINE void for_level(int64_t level, int64_t blocks, const Visit& visit) {
  const int64_t size = int64_t(1) << level;
  for (int64_t first = 0; first + size < blocks; first += 2 * size)
    visit(Pair{level, first, first + size, smaller(blocks, first + 2 * size)});
}

// The spans of the next level: of pairs, and of a last block that has no neighbour.
template <class T>
static void join_spans(const Chunk<T>& c, const Frame<T>& f, int64_t level) {
  const int64_t size = int64_t(1) << level;
  const T* spans = c.spans + level * f.blocks * f.step_k;
  T* next = c.spans + (level + 1) * f.blocks * f.step_k;
  for (int64_t first = 0; first < c.blocks; first += 2 * size) {
    const T* early = spans + first * f.step_k;
    if (first + size < c.blocks) multiply(next + first * f.step_k, early, early + size * f.step_k, f.wide_k);
    else std::memcpy(next + first * f.step_k, early, f.wide_k * sizeof(T));
  }
}

// to = from * factor, rows [., K] each times the same.
template <class T>
static void fade_all(const T* from, T* to, int64_t rows, int64_t step, const T* factor, int64_t channels) {
  for (int64_t t = 0; t < rows; ++t) multiply(to + t * step, from + t * step, factor, channels);
}

// The products between two neighbours, and their rows and columns as the pair leaves them. `saved`: rows before that.
template <class T>
static void join(Chunk<T>& c, const Frame<T>& f, const Pair& pair, T* saved) {
  constexpr int64_t block = kBlock<T>;
  const int64_t row = pair.middle * block * c.reads, some = (pair.last - pair.middle) * block * c.reads;
  const int64_t column = pair.first * block, columns = (pair.middle - pair.first) * block;
  const T* spans = c.spans + pair.level * f.blocks * f.step_k;
  const T *before = spans + pair.first * f.step_k, *after = spans + pair.middle * f.step_k;
  T* rows = c.rows + row * f.step_k;
  for (int64_t n = 0; n < f.writes; ++n) {
    T* turned = c.turned + n * c.tall + column;
    if (some)
      product<T>({rows, f.step_k}, some, {turned, f.step_c}, columns, f.K,
                 {c.grams + row * f.step_c + n * c.tall + column, f.step_c});
    for (int64_t i = 0; i < f.K; ++i) multiply(turned + i * f.step_c, turned + i * f.step_c, after[i], columns);
  }
  if (saved) std::memcpy(saved + row * f.step_k, rows, some * f.step_k * sizeof(T));
  fade_all(rows, rows, some, f.step_k, before, f.wide_k);
}

// Read a chunk; then its products, and what of it reaches beyond. `given`: where rows stay as they came, which may be
// c.rows; `saved`: [levels] more.
template <class T>
static void fade_chunk(Chunk<T>& c, const Frame<T>& f, int64_t begin, T* given, T* saved) {
  const int64_t tokens = f.tall() * f.reads * f.step_k;
  fill(c.grams, T(0), c.tall * c.reads * f.step_c);
  for (int64_t b = 0; b < c.blocks; ++b) {
    read_block(c, f, begin, b, given);
    fade_block_of(c, f, b, given);
  }
  for (int64_t level = 0; int64_t(1) << level < c.blocks; ++level) {
    for_level(level, c.blocks, [&](const Pair& pair) { join(c, f, pair, saved ? saved + level * tokens : nullptr); });
    join_spans(c, f, level);
  }
}

}  // namespace innerloop::INNERLOOP_ISA::channel
