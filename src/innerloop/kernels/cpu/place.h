// Where a job of a memory that is matrices stands, its scratch, and the trail from its values to its gradients.
#pragma once

#include "convert.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace innerloop::INNERLOOP_ISA {

// Tokens of one head.
struct Span {
  int64_t head = 0, begin = 0, end = 0;
};

// The chunk that is worked on and the one that comes after it, of this head or of a neighbour's.
struct Turns {
  Span now, next;

  // From a token to the one that is read kAhead rows later, and its head; false: there is none.
  bool ahead(int64_t* token, int64_t* head) const {
    const int64_t beyond = *token + kAhead - now.end;
    const Span& span = beyond < 0 ? now : next;
    *token = beyond < 0 ? *token + kAhead : span.begin + beyond;
    *head = span.head;
    return *token < span.end;
  }
};

constexpr int64_t kNear = 12 << 20;  // bytes of memories that a cache which cores share will hold

// One head of one sequence.
template <class Call>
struct Place {
  static constexpr bool kMayBeSparse = false;  // whether its trail keeps fewer memories when it is large
  const Call& call;
  int64_t K, V, C;
  int64_t sequence, head, begin, end, row;

  Place(const Call& c, int64_t sequence_, int64_t head_)
      : call(c), K(c.key_width), V(c.width), C(smaller(c.chunk, c.header.length < 1 ? 1 : c.header.length)) {
    sequence = sequence_, head = head_;
    begin = c.header.bounds ? c.header.bounds[sequence] : 0;
    end = c.header.bounds ? c.header.bounds[sequence + 1] : c.header.length;
    row = c.header.bounds ? 0 : sequence;
  }
  // Stand where the longest sequence would: nobody needs more scratch.
  void stretch() {
    const Header& h = call.header;
    begin = 0, end = h.bounds ? 0 : h.length;
    for (int64_t n = 0; h.bounds && n < h.sequences; ++n)
      if (h.bounds[n + 1] - h.bounds[n] > end) end = h.bounds[n + 1] - h.bounds[n];
  }
  int64_t key_head() const { return key_head_of(head); }
  int64_t key_head_of(int64_t of) const { return of / (call.heads / call.key_heads); }
  int64_t matrix() const { return (sequence * call.heads + head) * K * V; }
  // Whether the memories of all heads lie farther than in the processor's caches.
  bool far() const { return call.header.sequences * call.heads * K * V * (call.wide ? 8 : 4) > kNear; }
  int64_t chunks() const { return (end - begin + C - 1) / C; }
  int64_t written() const { return C; }  // rows that a chunk writes
  // Chunk i; before the first and behind the last there is nothing.
  Span span(int64_t i) const {
    const int64_t from = begin + i * C;
    return {head, from, i < 0 ? from : smaller(end, from + C)};
  }
  // Of [B, T, G] outputs.
  int64_t place(int64_t token) const { return (row * call.header.length + token) * call.heads + head; }
  int64_t at(const Strided& x, int64_t token, int64_t of) const { return row * x.row + token * x.token + of * x.head; }
  int64_t own(const Strided& x, int64_t token) const { return at(x, token, head); }
  int64_t shared(const Strided& x, int64_t token) const { return at(x, token, key_head()); }
};

constexpr int64_t kSparseFrom = 64 << 20;  // bytes of a trail

// Hands out rows of a job's scratch; without memory it only counts.
struct Arena {
  char* memory;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    const int64_t size = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    T* found = reinterpret_cast<T*>(memory + used);
    used += size + kGap;
    if (!memory) return nullptr;
    fence(reinterpret_cast<char*>(found), size);
    return found;
  }

#ifdef __SANITIZE_ADDRESS__
  // What lies between two rows belongs to nobody, and what an earlier job left must not be read.
  static constexpr int64_t kGap = 64;
  static void fence(char* rows, int64_t size) {
    __asan_unpoison_memory_region(rows, size);
    std::memset(rows, 0xff, size);
    __asan_poison_memory_region(rows + size, kGap);
  }
#else
  static constexpr int64_t kGap = 0;
  static void fence(char*, int64_t) {}
#endif
};

// Of one head: the memory at every kept chunk's start, which has f.memory() numbers, and all chunks' writes [written, V].
template <class T>
struct Trail {
  T* data = nullptr;
  int64_t step = 0, memory = 0, writes = 0;
  int64_t every = 1;  // one memory is kept of so many chunks

  bool keeps(int64_t i) const { return i % every == 0; }
  T* state(int64_t i) const { return data + i / every * step; }
  T* update(int64_t i) const { return state(i) + memory + i % every * writes; }

  template <class F>
  static int64_t block(const F& f, int64_t every) {
    return f.memory() + every * f.written() * f.step_v;
  }
  template <class F>
  static Trail of_scratch(Arena& arena, const F& f, int64_t chunks) {
    return {arena.take<T>(chunks * block(f, 1)), block(f, 1), f.memory()};
  }
  // Of the call's trail, where the heads of a chunk lie side by side; packed sequences begin a block of their own.
  template <class F>
  static Trail of_call(const F& f) {
    const int64_t every = every_of(f), h = f.call.heads, size = block(f, every);
    const int64_t before = f.call.header.bounds ? (f.begin - f.call.header.bounds[0]) / (every * f.C) + f.sequence
                                                : f.sequence * blocks(f, every);
    T* data = static_cast<T*>(f.call.trail) + (before * h + f.head) * size;
    return {data, h * size, f.memory(), f.written() * f.step_v, every};
  }
  template <class F>
  static int64_t of_call_bytes(const F& f) {
    return bytes(f, every_of(f));
  }

 private:
  // A large trail that may be sparse keeps one memory of four: the others come again from the writes, in a time that
  // did not differ from that of keeping them, and peak memory is less by a fifth.
  template <class F>
  static int64_t every_of(const F& f) {
    return f.kMayBeSparse && bytes(f, 1) > kSparseFrom ? 4 : 1;
  }
  template <class F>
  static int64_t blocks(const F& f, int64_t every) {
    return (f.chunks() + every - 1) / every;
  }
  template <class F>
  static int64_t bytes(const F& f, int64_t every) {
    const Header& h = f.call.header;
    const int64_t all = h.bounds ? h.length / (every * f.C) + h.sequences + 1 : h.sequences * blocks(f, every);
    return all * f.call.heads * block(f, every) * int64_t(sizeof(T));
  }
};

// A chunk's rows of v, or of what has its shape.
template <class T, class F>
static void read_values(const Turns& turns, const F& f, const Strided& v, int64_t begin, int64_t size, T* to) {
  for (int64_t t = 0; t < size; ++t) {
    int64_t later = begin + t, head;
    if (turns.ahead(&later, &head)) ask_row(v, f.at(v, later, head), f.V);
    read_row(v, f.own(v, begin + t), f.V, to + t * f.step_v);
  }
}

// States of a call: [N, G, K, V], from and to rows that lie f.step_v apart.
template <class T, class F>
static void read_state(const F& f, const void* data, T* to) {
  const Strided state{const_cast<void*>(data), 0, 0, 0, 1, f.call.wide ? kDouble : kFloat};
  for (int64_t k = 0; k < f.K; ++k) read_row<T>(state, f.matrix() + k * f.V, f.V, to + k * f.step_v);
}
// No memory: zeros.
template <class T, class F>
static void write_state(const F& f, const T* from, void* data) {
  for (int64_t k = 0; k < f.K; ++k) {
    T* to = static_cast<T*>(data) + f.matrix() + k * f.V;
    if (from) std::memcpy(to, from + k * f.step_v, f.V * sizeof(T));
    else std::memset(to, 0, f.V * sizeof(T));
  }
}

}  // namespace innerloop::INNERLOOP_ISA
