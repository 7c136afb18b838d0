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
struct Frame {
  const ChannelCall& call;
  int64_t K, V, C;
  int64_t reads, writes;  // rows of a token that read and that are written
  int64_t wide_k, wide_v, step_k, step_v, step_c;
  int64_t blocks, levels;  // of a chunk; a level joins pairs of blocks
  int64_t sequence, head, begin, end, row;

  Frame(const ChannelCall& c, int64_t job)
      : call(c), K(c.key_width), V(c.width), C(smaller(c.chunk, c.header.length < 1 ? 1 : c.header.length)) {
    reads = c.kind == kAdd ? 1 : 2, writes = c.kind == kGeneralized ? 2 : 1;
    wide_k = padded<T>(K), wide_v = padded<T>(V);
    step_k = spread<T>(K), step_v = spread<T>(V);
    blocks = (C + kBlock<T> - 1) / kBlock<T>, step_c = writes * blocks * kBlock<T>;
    levels = level_of(blocks);
    sequence = job / c.heads, head = job % c.heads;
    begin = c.header.bounds ? c.header.bounds[sequence] : 0;
    end = c.header.bounds ? c.header.bounds[sequence + 1] : c.header.length;
    row = c.header.bounds ? 0 : sequence;
  }
  // How often neighbours join until so many blocks are one.
  static int64_t level_of(int64_t blocks) {
    int64_t level = 0;
    while (int64_t(1) << level < blocks) ++level;
    return level;
  }
  int64_t key_head() const { return head / (call.heads / call.key_heads); }
  int64_t matrix() const { return (sequence * call.heads + head) * K * V; }
  int64_t chunks() const { return (end - begin + C - 1) / C; }
  int64_t tall() const { return blocks * kBlock<T>; }
  // Of [B, T, G] outputs.
  int64_t place(int64_t token) const { return (row * call.header.length + token) * call.heads + head; }
  int64_t at(const Strided& x, int64_t token, int64_t of) const { return row * x.row + token * x.token + of * x.head; }
  int64_t own(const Strided& x, int64_t token) const { return at(x, token, head); }
  int64_t shared(const Strided& x, int64_t token) const { return at(x, token, key_head()); }
};

// A chunk of `size` tokens, filled up to whole blocks with tokens that change nothing.
template <class T>
struct Chunk {
  int64_t size, tall, blocks;
  int64_t reads;       // of a token's rows, how many are here
  T* rows;             // [tall reads, K]: q and x of a token, one under the other
  T* columns;          // [writes tall, K]: y
  T* keep;             // [tall, K]: e^g
  T* spans;            // [levels + 1][blocks, K]: what neighbouring blocks keep together
  T* turned;           // [K, writes tall]: columns, turned
  T* grams;            // [tall reads, writes tall]: what rows read of columns, 0 above the diagonal
  T *unit_q, *unit_k;  // by what queries and keys were multiplied

  void take(Arena& arena, const Frame<T>& f) {
    const int64_t tokens = f.tall();
    rows = arena.take<T>(tokens * f.reads * f.step_k), columns = arena.take<T>(tokens * f.writes * f.step_k);
    keep = arena.take<T>(tokens * f.step_k), spans = arena.take<T>((f.levels + 1) * f.blocks * f.step_k);
    turned = arena.take<T>(f.wide_k * f.step_c), grams = arena.take<T>(tokens * f.reads * f.step_c);
    unit_q = arena.take<T>(tokens), unit_k = arena.take<T>(tokens);
  }
  void begin(const Frame<T>& f, int64_t tokens, bool queries) {
    size = tokens, blocks = (size + kBlock<T> - 1) / kBlock<T>, tall = blocks * kBlock<T>;
    reads = queries ? f.reads : f.reads - 1;
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
template <class T>
INNERLOOP_INLINE void fill(T* to, T value, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<T>) store(to + i, splat(value));
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

template <class T>
static void read_chunk(Chunk<T>& c, const Frame<T>& f, int64_t begin) {
  const int64_t apart = c.tall * f.step_k;
  for (int64_t t = 0; t < c.size; ++t) {
    T *row = c.rows + t * c.reads * f.step_k, *x = row + (c.reads - 1) * f.step_k;
    if (c.reads == f.reads) c.unit_q[t] = read_query(f, begin + t, row);
    c.unit_k[t] = read_keys(f, begin + t, x, c.columns + t * f.step_k, apart);
    read_keep(f, begin + t, c.keep + t * f.step_k);
  }
  const int64_t rest = c.tall - c.size;
  if (!rest) return;
  fill(c.rows + c.size * c.reads * f.step_k, T(0), rest * c.reads * f.step_k);
  fill(c.keep + c.size * f.step_k, T(1), rest * f.step_k);
  for (int64_t n = 0; n < f.writes; ++n) fill(c.columns + n * apart + c.size * f.step_k, T(0), rest * f.step_k);
}

// Ask for rows that the next chunk will read: they lie a page apart, where no prefetcher of the processor's follows.
template <class T>
static void ask_ahead(const Strided& x, const Frame<T>& f, int64_t begin, int64_t of, int64_t n) {
  constexpr int64_t sizes[] = {4, 8, 2, 2};
  const int64_t size = sizes[x.element];
  if (!x.data || x.column != 1) return;
  const int64_t from = begin < f.begin ? f.begin : begin, to = smaller(f.end, begin + f.C);
  for (int64_t t = from; t < to; ++t) {
    const char* row = static_cast<const char*>(x.data) + f.at(x, t, of) * size;
    for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch(row + i, 0, 3);
  }
}

// Gates of the next chunk, in the order of the call.
template <class T>
static void ask_ahead_gates(const Frame<T>& f, int64_t begin) {
  const ChannelCall& call = f.call;
  ask_ahead(call.g, f, begin, f.head, f.K);
  if (call.kind > kDelta) ask_ahead(call.first, f, begin, f.head, f.K);
  if (call.kind == kDecoupled) ask_ahead(call.second, f, begin, f.head, f.V);
  if (call.kind == kGeneralized) ask_ahead(call.second, f, begin, f.key_head(), f.K);
}

// Values of a chunk, behind what is corrected where both are written; `row` is for gates.
template <class T>
static void read_values(const Chunk<T>& c, const Frame<T>& f, int64_t begin, T* writes, T* row) {
  T* values = writes + (f.writes - 1) * c.tall * f.step_v;
  for (int64_t t = 0; t < c.size; ++t) read_value(f, begin + t, values + t * f.step_v, row);
  for (int64_t n = 0; n < f.writes && c.tall > c.size; ++n)
    fill(writes + (n * c.tall + c.size) * f.step_v, T(0), (c.tall - c.size) * f.step_v);
}

template <class T>
static void read_state(const Frame<T>& f, const void* data, T* to) {
  const Strided state{const_cast<void*>(data), 0, 0, 0, 1, f.call.wide ? kDouble : kFloat};
  for (int64_t k = 0; k < f.K; ++k) read_row<T>(state, f.matrix() + k * f.V, f.V, to + k * f.step_v);
}
template <class T>
static void write_state(const Frame<T>& f, const T* from, void* data) {
  for (int64_t k = 0; k < f.K; ++k) {
    T* to = static_cast<T*>(data) + f.matrix() + k * f.V;
    if (from) std::memcpy(to, from + k * f.step_v, f.V * sizeof(T));
    else std::memset(to, 0, f.V * sizeof(T));
  }
}

}  // namespace innerloop::INNERLOOP_ISA::channel
