// What a call says: the structures that the Python side packs, all fields eight bytes wide.
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

// Every call begins with this: jobs do not wait for each other, and the library spreads them over threads.
struct Header {
  int64_t jobs, threads;
  int64_t sequences, length;
  const int64_t* bounds;  // sequences + 1 of them, where they are packed in one row of `length` tokens
};

// One memory a head, faded by one number a token (scalar.h).
struct ScalarCall {
  Header header;
  int64_t corrects;  // 0: the pair is added; 1: the delta rule; 2: the delta rule at the rate of the proximal step
  int64_t key_heads, heads, key_width, width;
  int64_t together;  // heads of one sequence that a job takes
  int64_t chunk, unit;
  int64_t wide;  // arithmetic and states are float64, not float32
  double scale;
  Strided q, k, v, g, beta;
  const void* state;  // [N, G, K, V], or absent for zeros
  void* trail;        // memories and writes of every chunk, from the values to the gradients; absent: computed again
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

// One memory a head, each of whose K channels fades at its own pace (channel.h):
//   S' = diag(e^g) S + y (v - x^T diag(e^g) S)^T, or where an erase has a key of its own
//   S' = diag(e^g) S - y (x^T S)^T + k v^T.
struct ChannelCall {
  Header header;
  int64_t kind;  // 0: the pair is added; 1: x = k, y = beta k; 2: x = b k, y = k, value w v; 3: x = kappa, y = a kappa
  int64_t key_heads, heads, key_width, width;
  int64_t chunk, unit;
  int64_t wide;
  double scale;
  Strided q, k, v, g;
  Strided first, second;  // beta; b and w; a and kappa (which has key heads)
  const void* state;
  void* trail;  // as that of ScalarCall
  void *out, *final;
  Strided grad_out;
  const void* grad_final;
  void *grad_q, *grad_k, *grad_v;
  void *grad_g, *grad_first, *grad_second;  // in their gates' own elements, but that of kappa, which is [B, T, G, K]
  void* grad_state;
  int64_t grad_element, kappa_element;  // of grad_q and grad_k; of kappa's gradient
};

// Momentum and forgetting on a linear memory (momentum.h): two matrices a head, S and the momentum U.
struct MomentumCall {
  Header header;
  int64_t key_heads, heads, key_width, width;
  int64_t chunk, unit, wide;
  double scale;
  Strided q, k, v, theta, eta, alpha;
  const void *state, *momentum;  // [N, G, K, V], each absent for zeros
  void* trail;                   // as that of ScalarCall
  void* out;                     // [B, T, G, V] in v's element
  void *final, *final_momentum;
  Strided grad_out;
  const void *grad_final, *grad_final_momentum;
  void *grad_q, *grad_k, *grad_v;            // as those of ScalarCall
  void *grad_theta, *grad_eta, *grad_alpha;  // [B, T, G], in the precision of arithmetic
  void *grad_state, *grad_momentum;
  int64_t grad_element;
};

// A short causal convolution for every channel (convolution.h). All x is [B, T, C]; jobs are shares of the tokens of all
// rows, and behind them shares of the windows.
struct ConvolutionCall {
  Header header;
  int64_t rows, channels, taps;
  int64_t shares, tokens, windows;  // shares of tokens; tokens in one; windows in one
  int64_t silu, wide;
  Strided x;
  const void *weight, *bias;  // [W, C], the newest input's last; [C] or absent: all wide
  const void* window;         // [N, W - 1, C], wide
  void* out;                  // in x's element
  void* after;                // [N, W - 1, C]
  Strided grad_out;
  const void* grad_after;
  void* grad_x;  // in x's element
  void *grad_window, *grad_weight;  // grad_weight: [shares, W + 1, C], of weights and under them the bias
};

// A norm of every row, with a gate (norm.h). Rows are those of [B, T, heads, width], T the header's length.
struct NormCall {
  Header header;
  int64_t rows, heads, width;
  int64_t share;  // rows of a job
  int64_t measure, activation, gate_first, wide;
  double eps;
  Strided x, gate;
  const void* weight;  // [width], wide, or absent for ones
  void* out;           // in x's element
  Strided grad_out;
  void *grad_x, *grad_gate;  // in x's and the gate's element
  void* grad_weight;         // [jobs, width]
};

// Linear maps of a few tokens, several of one input (linear.h). Jobs are shares of the maps' rows.
constexpr int64_t kMaps = 8;
struct LinearCall {
  Header header;
  int64_t tokens, width, share, adds;  // rows of a job; whether `outs` hold something to add to
  const void* x;                       // [tokens, width]
  const void* weights[kMaps];          // [height, width]
  int64_t heights[kMaps];
  void* outs[kMaps];  // [tokens, height]
};

// A gate, number by number (linear.h): other silu(x); factor / (1 + e^-x); or the decay -e^rate log(1 + e^(x + other)).
enum GateKind : int64_t { kSiluTimes = 0, kSigmoidTimes = 1, kDecay = 2 };
struct GateCall {
  Header header;
  int64_t kind, tokens, width;
  double factor;
  const void *x, *other, *rate;  // [tokens, width]; as x, or [width] of a decay; [width]
  void* out;
};

// What the library can compute. `way` is 0 for values and 1 for gradients; a job's scratch is aligned to 64 bytes.
// `scratch` of way 2 is the size of the trail.
struct Core {
  int64_t call_size;
  int64_t (*scratch)(const void* call, int64_t way);
  void (*run)(const void* call, int64_t way, int64_t job, char* scratch);
};

enum : int64_t { kScalar = 0, kChannel, kMomentum, kConvolution, kNorm, kLinear, kGate, kCores };

}  // namespace innerloop
