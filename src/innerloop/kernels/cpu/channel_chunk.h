// Where a job of a memory that fades by channel stands, and one chunk of its tokens as rows:
// those that read, q and what is erased by, and those that are written, under them what each channel keeps.
#pragma once

#include "chunk.h"

namespace innerloop::INNERLOOP_ISA::channel {

// Tokens that run through a block one after another; blocks join by pairs to the chunk.
template <class T>
constexpr int64_t kBlock = kLanes<T> < 8 ? 8 : kLanes<T>;

enum Kind : int64_t { kAdd, kDelta, kDecoupled, kGeneralized };

template <class T>
struct Frame : Place<ChannelCall> {
  int64_t reads, writes;  // rows of a token that read and that are written
  int64_t wide_k, wide_v, step_k, step_v, step_c;
  int64_t blocks, levels;  // of a chunk; a level joins pairs of blocks

  Frame(const ChannelCall& c, int64_t job) : Place(c, job / c.heads, job % c.heads) {
    reads = c.kind == kAdd ? 1 : 2, writes = c.kind == kGeneralized ? 2 : 1;
    wide_k = padded<T>(K), wide_v = padded<T>(V);
    step_k = spread<T>(K), step_v = spread<T>(V);
    blocks = (C + kBlock<T> - 1) / kBlock<T>, step_c = writes * blocks * kBlock<T>;
    levels = level_of(blocks);
  }
  // How often neighbours join until so many blocks are one.
  static int64_t level_of(int64_t blocks) {
    int64_t level = 0;
    while (int64_t(1) << level < blocks) ++level;
    return level;
  }
  int64_t tall() const { return blocks * kBlock<T>; }
  int64_t memory() const { return K * step_v; }
  int64_t written() const { return writes * tall(); }
};

// A chunk of `size` tokens, filled up to whole blocks with tokens that change nothing.
template <class T>
struct Chunk {
  int64_t size, tall, blocks;
  int64_t reads;       // of a token's rows, how many are here
  bool held;           // whether y and e^g of all blocks are held, or those of one at a time
  T* rows;             // [tall reads, K]: q and x of a token, one under the other
  T* columns;          // [writes tall, K], or [writes block, K]: y
  T* keep;             // [tall, K], or [block, K]: e^g
  T* spans;            // [levels + 1][blocks, K]: what neighbouring blocks keep together
  T* turned;           // [K, writes tall]: columns, turned
  T* grams;            // [tall reads, writes tall]: what rows read of columns, 0 above the diagonal
  T *unit_q, *unit_k;  // by what queries and keys were multiplied
  Turns turns;

  void take(Arena& arena, const Frame<T>& f, bool hold) {
    const int64_t tokens = f.tall(), here = hold ? tokens : kBlock<T>;
    rows = arena.take<T>(tokens * f.reads * f.step_k), columns = arena.take<T>(here * f.writes * f.step_k);
    keep = arena.take<T>(here * f.step_k), spans = arena.take<T>((f.levels + 1) * f.blocks * f.step_k);
    turned = arena.take<T>(f.wide_k * f.step_c), grams = arena.take<T>(tokens * f.reads * f.step_c);
    unit_q = arena.take<T>(tokens), unit_k = arena.take<T>(tokens);
  }
  void begin(const Frame<T>& f, int64_t tokens, bool queries, bool hold) {
    held = hold, size = tokens, blocks = (size + kBlock<T> - 1) / kBlock<T>, tall = blocks * kBlock<T>;
    reads = queries ? f.reads : f.reads - 1;
  }
  T* kept(const Frame<T>& f, int64_t b) const { return keep + (held ? b * kBlock<T> : 0) * f.step_k; }
  T* written(const Frame<T>& f, int64_t n, int64_t b) const {
    return columns + (held ? n * tall + b * kBlock<T> : n * kBlock<T>) * f.step_k;
  }
  const T* whole(const Frame<T>& f) const { return spans + f.level_of(blocks) * f.blocks * f.step_k; }
  // Between two rows of one operand.
  int64_t gram_step(const Frame<T>& f) const { return reads * f.step_c; }
  const T* asked_gram(const Frame<T>& f) const { return grams + (reads - 1) * f.step_c; }
};

template <class T>
INNERLOOP_INLINE void multiply(T* to, const T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<T>) store(to + i, load(a + i) * load(b + i));
}
template <class T>
INNERLOOP_INLINE void multiply(T* to, const T* a, T b, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<T>) store(to + i, load(a + i) * b);
}

// x and all y of a token, y's rows `apart`; returns by what the key was multiplied.
template <class T>
static T read_keys(const Frame<T>& f, int64_t token, T* x, T* y, int64_t apart) {
  const ChannelCall& call = f.call;
  T* k = call.kind == kDelta ? x : call.kind == kGeneralized ? y + apart : y;
  read_row(call.k, f.shared(call.k, token), f.K, k);
  const T factor = call.unit ? make_unit(k, f.wide_k) : T(1);
  if (call.kind == kDelta) multiply(y, x, T(read_one(call.first, f.own(call.first, token))), f.wide_k);
  if (call.kind == kDecoupled) {
    read_row(call.first, f.own(call.first, token), f.K, x);
    multiply(x, x, k, f.wide_k);
  }
  if (call.kind == kGeneralized) {
    read_row(call.second, f.shared(call.second, token), f.K, x);
    read_row(call.first, f.own(call.first, token), f.K, y);
    multiply(y, y, x, f.wide_k);
  }
  return factor;
}

template <class T>
static T read_query(const Frame<T>& f, int64_t token, T* q) {
  read_row(f.call.q, f.shared(f.call.q, token), f.K, q);
  return f.call.unit ? make_unit(q, f.wide_k) : T(1);
}

// The value that is written, and `by` what it was multiplied, if that is asked for.
template <class T>
static void read_value(const Frame<T>& f, int64_t token, T* value, T* by) {
  read_row(f.call.v, f.own(f.call.v, token), f.V, value);
  if (f.call.kind != kDecoupled) return;
  read_row(f.call.second, f.own(f.call.second, token), f.V, by);
  multiply(value, value, by, f.wide_v);
}

template <class T>
static void read_keep(const Frame<T>& f, int64_t token, T* keep) {
  if (!f.call.g.data) return fill(keep, T(1), f.wide_k);
  read_row(f.call.g, f.own(f.call.g, token), f.K, keep);
  for (int64_t i = 0; i < f.wide_k; i += kLanes<T>) store(keep + i, exp_of(load(keep + i)));
}

// All rows of a token but that of its value.
template <class T>
INNERLOOP_INLINE void ask_token(const Turns& turns, const Frame<T>& f, int64_t token, bool query) {
  const ChannelCall& call = f.call;
  int64_t head;
  if (!turns.ahead(&token, &head)) return;
  if (query) ask_row(call.q, f.shared(call.q, token), f.K);
  ask_row(call.k, f.shared(call.k, token), f.K);
  ask_row(call.g, f.own(call.g, token), f.K);
  if (call.kind > kDelta) ask_row(call.first, f.own(call.first, token), f.K);
  if (call.kind == kGeneralized) ask_row(call.second, f.shared(call.second, token), f.K);
}

// Read the tokens of a block of the chunk that starts at `begin`, and fill it up.
template <class T>
static void read_block(Chunk<T>& c, const Frame<T>& f, int64_t begin, int64_t b, T* rows) {
  constexpr int64_t block = kBlock<T>;
  const int64_t first = b * block, some = smaller(block, c.size - first);
  const bool query = c.reads == f.reads;
  T *keep = c.kept(f, b), *columns = c.written(f, 0, b);
  rows += first * c.reads * f.step_k;
  for (int64_t t = 0; t < some; ++t) {
    const int64_t token = begin + first + t;
    T *row = rows + t * c.reads * f.step_k, *x = row + (c.reads - 1) * f.step_k;
    ask_token(c.turns, f, token, query);
    if (query) c.unit_q[first + t] = read_query(f, token, row);
    c.unit_k[first + t] = read_keys(f, token, x, columns + t * f.step_k, c.written(f, 1, b) - columns);
    read_keep(f, token, keep + t * f.step_k);
  }
  if (some == block) return;
  fill(rows + some * c.reads * f.step_k, T(0), (block - some) * c.reads * f.step_k);
  fill(keep + some * f.step_k, T(1), (block - some) * f.step_k);
  for (int64_t n = 0; n < f.writes; ++n) fill(c.written(f, n, b) + some * f.step_k, T(0), (block - some) * f.step_k);
}

// Values of a chunk, behind what is corrected where both are written; `row` is for gates.
template <class T>
static void read_values(const Chunk<T>& c, const Frame<T>& f, int64_t begin, T* writes, T* row) {
  T* values = writes + (f.writes - 1) * c.tall * f.step_v;
  for (int64_t t = 0; t < c.size; ++t) {
    int64_t later = begin + t, head;
    if (c.turns.ahead(&later, &head)) {
      ask_row(f.call.v, f.own(f.call.v, later), f.V);
      if (f.call.kind == kDecoupled) ask_row(f.call.second, f.own(f.call.second, later), f.V);
    }
    read_value(f, begin + t, values + t * f.step_v, row);
  }
  for (int64_t n = 0; n < f.writes && c.tall > c.size; ++n)
    fill(writes + (n * c.tall + c.size) * f.step_v, T(0), (c.tall - c.size) * f.step_v);
}

}  // namespace innerloop::INNERLOOP_ISA::channel
