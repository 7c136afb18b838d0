// A chunk whose q, k and v are bfloat16, in products of pairs. Those of q and k with k are exact, for the rows are taken
// as they lie in memory; for q S the memory is rounded to bfloat16. Nothing that is rounded comes back to the memory.
#pragma once

#include "chunk.h"

namespace innerloop::INNERLOOP_ISA {

// Whether calls in bfloat16 take pairs here. The library may change it when it loads.
extern bool takes_pairs;

// Rows of bfloat16 are pairs where the first of two numbers is the low half.
static bool paired(const ScalarCall& call) {
  const bool brain = call.q.element == kBrain && call.k.element == kBrain && call.v.element == kBrain;
  return takes_pairs && brain && !call.wide && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
}

struct Pairs {
  Brain* qk;           // queries and under them keys [2C, K]
  Pair *kt, *memory;   // keys turned [K/2, C]; the memory of the chunk's start [K/2, V]
  int64_t deep, step;  // pairs in a row of qk; from row to row

  void take(Arena& arena, const Frame<float>& f) {
    deep = (f.K + 1) / 2, step = spread<float>(deep);
    qk = arena.take<Brain>(4 * f.C * step), kt = arena.take<Pair>(padded<float>(deep) * f.step_c);
    memory = arena.take<Pair>(deep * f.step_v);
  }
  Brain* row(int64_t i) const { return qk + 2 * i * step; }
  Left<Pair> rows(int64_t i) const { return {reinterpret_cast<const Pair*>(row(i)), step}; }
};

// A row as it lies in memory, with zeros behind it; one that is to be multiplied by zero may hold anything.
static void copy_row(const Strided& x, int64_t offset, int64_t n, bool vanishes, Brain* to, int64_t width) {
  const Brain* from = static_cast<const Brain*>(x.data) + offset;
  if (x.column == 1) std::memcpy(to, from, n * sizeof(Brain));
  else
    for (int64_t i = 0; i < n; ++i) to[i] = from[i * x.column];
  const int64_t kept = vanishes ? 0 : n;
  std::memset(to + kept, 0, (width - kept) * sizeof(Brain));
}

// Rows of floats, rounded and two and two in pairs; an odd last one has zeros beside it.
static void pack(const float* from, int64_t step, int64_t rows, int64_t columns, Pair* to) {
  for (int64_t t = 0; t < rows; t += 2)
    for (int64_t i = 0; i < columns; i += kLanes<float>) {
      const float* row = from + t * step + i;
      const Vec<Pair> high = t + 1 < rows ? rounded(load(row + step)) : Vec<Pair>{};
      store(to + t / 2 * step + i, rounded(load(row)) >> 16 | high);
    }
}

// Read the chunk's tokens, all but v. Rows of floats beside them are what norms and writes are made of.
static void read_tokens(Pairs& x, Chunk<float>& chunk, const Frame<float>& f, int64_t begin, int64_t size) {
  const Strided &q = f.call.q, &k = f.call.k;
  float* keys = chunk.keys(f, size);
  for (int64_t t = 0; t < size; ++t) {
    read_token(chunk, f, begin + t, t, chunk.qk + t * f.step_k, keys + t * f.step_k, true);
    const bool no_q = f.call.unit && chunk.unit_q[t] == 0, no_k = f.call.unit && chunk.unit_k[t] == 0;
    copy_row(q, f.shared(q, begin + t), f.K, no_q, x.row(t), 2 * x.step);
    copy_row(k, f.shared(k, begin + t), f.K, no_k, x.row(size + t), 2 * x.step);
  }
  transpose(reinterpret_cast<const float*>(x.row(size)), x.step, size, padded<float>(x.deep),
            reinterpret_cast<float*>(x.kt), f.step_c);
  read_rates(chunk, f, begin, size);
  read_decays(chunk, f, begin, size);
}

// Unit length is left to the products: rows are multiplied at their end, columns as they fade.
static void fill_coefficients(const Pairs& x, Chunk<float>& chunk, const Frame<float>& f, int64_t size) {
  const int64_t wide = padded<float>(size);
  const Right<Pair> kt{x.kt, f.step_c};
  const auto into = [&](float* to, const float* unit) {
    return Into<float>{to, f.step_c, nullptr, nullptr, 0, f.call.unit ? unit : nullptr};
  };
  fill_fade(chunk, f, size);
  product<Pair>(x.rows(0), size, kt, wide, x.deep, into(chunk.scores, chunk.unit_q), Part::lower_result);
  if (f.call.corrects)
    product<Pair>(x.rows(size), size, kt, wide, x.deep, into(chunk.pairs, chunk.unit_k), Part::lower_result);
  for (int64_t t = 0; t < size && f.call.unit; ++t)
    for (int64_t s = 0; s <= t; ++s) chunk.fade[t * f.step_c + s] *= chunk.unit_k[s];
  fade_products(chunk, f, size, true);
}

// What the memory of the chunk's start answers to q, and to k: that goes back into the memory, and is not rounded.
static void ask_memory(const Pairs& x, Chunk<float>& chunk, const Frame<float>& f, int64_t size, const float* memory) {
  const Into<float> into{chunk.read, f.step_v, nullptr, nullptr, 0, f.call.unit ? chunk.unit_q : nullptr};
  pack(memory, f.step_v, f.K, f.wide_v, x.memory);
  product<Pair>(x.rows(0), size, {x.memory, f.step_v}, f.wide_v, x.deep, into);
  if (!f.call.corrects) return;
  float* asked = chunk.read + size * f.step_v;
  product<float>({chunk.keys(f, size), f.step_k}, size, {memory, f.step_v}, f.wide_v, f.K, {asked, f.step_v});
}

}  // namespace innerloop::INNERLOOP_ISA
