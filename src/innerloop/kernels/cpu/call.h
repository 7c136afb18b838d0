// What one call says: the same structure that kernels/native.py packs, all fields eight bytes wide.
#pragma once

#include <cstdint>

namespace innerloop {

enum Element : int64_t { kFloat = 0, kDouble = 1, kBrain = 2, kHalf = 3 };

// [B, T, heads, width], or [B, T, heads] with no last stride; strides count elements. No data: the tensor is absent.
struct Strided {
  void* data;
  int64_t row, token, head, column;
  int64_t element;
};

struct Call {
  int64_t corrects;  // 0: the pair is added; 1: the delta rule; 2: the delta rule at the rate of the proximal step
  int64_t sequences, length, key_heads, heads, key_width, width;
  const int64_t* bounds;  // sequences + 1 of them, where they are packed in one row of `length` tokens
  int64_t chunk, threads, unit;
  int64_t wide;  // arithmetic and states are float64, not float32
  double scale;
  Strided q, k, v, g, beta;
  const void* state;  // [N, G, K, V], or absent for zeros
  void* out;          // [B, T, G, V] in v's element
  void* final;        // [N, G, K, V]
  Strided grad_out;
  const void* grad_final;
  void *grad_q, *grad_k;  // [B, T, G, K]: value heads that share a key head are summed by the caller
  void* grad_v;           // [B, T, G, V]
  void *grad_g, *grad_beta;  // [B, T, G], in the precision of arithmetic
  void* grad_state;
  int64_t grad_element;  // of grad_q and grad_k; grad_v has v's
};

// One (sequence, value head); scratch holds at least what `scratch` asks for, aligned to 64 bytes.
struct Kernels {
  int64_t (*scratch)(const Call&, bool backward);
  void (*forward)(const Call&, int64_t job, char* scratch);
  void (*backward)(const Call&, int64_t job, char* scratch);
};

}  // namespace innerloop
