// A random call of the core of memories that fade by one number a token.
#pragma once

#include "outcome.h"
#include "random.h"

namespace emulate {

using innerloop::kBrain;
using innerloop::kDouble;
using innerloop::kFloat;
using innerloop::kHalf;
using innerloop::ScalarCall;

class Scalar {
  Random random;
  int64_t rows, length, key_heads, heads, key_width, width, element, together, chunk, corrects, sequences;
  bool unit, overwrite, with_g;
  double scale;
  std::vector<int64_t> bounds;
  Tensor q, k, v, g, beta, grad_out;
  Block state, grad_final;
  bool wants[6], wants_final;  // of the gradients of q, k, v, g, beta and the state

  bool wide() const { return element == kDouble; }
  int64_t wide_element() const { return wide() ? kDouble : kFloat; }
  // Gradients of keys that several heads share are summed afterwards.
  int64_t grad_element() const { return heads > key_heads ? wide_element() : element; }

  Layout layout(bool gradient) {
    const int64_t last = gradient ? int64_t(Layout::expanded) : int64_t(Layout::apart);
    return Layout(random.between(0, last));
  }
  void draw_sizes() {
    element = random.pick({kFloat, kFloat, kDouble, kBrain, kHalf});
    key_width = random.pick({1, 7, 16, 17, 33, 64}), width = random.pick({1, 7, 16, 17, 33, 64});
    // A wide memory is seldom a long one, for the emulator's sake.
    length = random.chance(0.2) ? 1 : random.between(1, key_width * width > 1100 && random.chance(0.7) ? 35 : 70);
    rows = random.between(1, 2), key_heads = random.between(1, 2), heads = key_heads * random.pick({1, 1, 2, 3});
    if (key_width * width * length > 20000) rows = 1, heads = key_heads * (heads > key_heads ? 2 : 1);
    together = random.between(1, 4), chunk = random.pick({1, 5, 16, 17, 32, 32, 64});
    corrects = random.between(0, 2), unit = random.chance(0.5), overwrite = random.chance(0.3);
    scale = random.chance(0.5) ? 1 : 1 / std::sqrt(double(key_width));
  }
  void draw_bounds() {
    sequences = rows;
    if (random.chance(0.35)) rows = 1, sequences = random.between(1, 4), bounds = packed(random, sequences, length);
  }
  void draw_tokens() {
    const double size = 1 / std::sqrt(double(key_width));  // longer keys make the delta rule grow without end
    const auto key = [&] { return unit ? 2 * random.normal() : size * random.normal(); };
    q = tensor(rows, length, key_heads, key_width, element, layout(false), key);
    // Nor are they short: the proximal step writes what a key is to answer divided by it.
    k = tensor(rows, length, key_heads, key_width, element, layout(false), [&] {
      return unit ? key() : size * (random.chance(0.5) ? 1 : -1) * (0.5 + 0.5 * random.uniform());
    });
    v = tensor(rows, length, heads, width, element, layout(false), [&] { return random.normal(); });
    grad_out = tensor(rows, length, heads, width, element, layout(true), [&] { return random.normal(); });
  }
  void draw_gates() {
    const int64_t own = random.chance(0.5) ? element : wide_element();
    with_g = random.chance(0.7);
    const double rate = random.pick({1, 10, 1000}) * 0.05;
    if (with_g)
      g = tensor(rows, length, heads, 0, own, layout(false), [&] {
        if (random.chance(0.03)) return -double(INFINITY);
        return random.chance(0.05) ? 0 : -rate * random.uniform();
      });
    if (!corrects) return;
    beta = tensor(rows, length, heads, 0, own, layout(false), [&] {
      if (random.chance(0.05)) return 0.0;
      if (corrects == 1) return 2 * random.uniform() * (unit ? 0.6 : 1);
      return random.chance(0.05) ? double(INFINITY) : std::exp(3 * random.normal());
    });
  }
  void draw_states() {
    const int64_t size = sequences * heads * key_width * width;
    const auto draw = [&] { return random.normal(); };
    if (random.chance(0.6)) state = numbers(size, wide_element(), draw);
    if (random.chance(0.6)) grad_final = numbers(size, wide_element(), draw);
    wants_final = random.chance(0.7);
    for (bool& one : wants) one = random.chance(0.85);
    // A unit vector of one number has no direction: nothing but rounding is left of its gradient.
    if (unit && key_width == 1) wants[0] = wants[1] = false;
  }

 public:
  explicit Scalar(uint64_t seed) : random(seed) {
    draw_sizes();
    draw_bounds();
    draw_tokens();
    draw_gates();
    draw_states();
  }

  std::string described() const {
    char text[400];
    std::snprintf(text, sizeof text,
                  "B=%d T=%d H=%d G=%d K=%d V=%d element=%d together=%d chunk=%d corrects=%d unit=%d g=%d state=%d "
                  "final=%d packed=%d",
                  int(rows), int(length), int(key_heads), int(heads), int(key_width), int(width), int(element),
                  int(together), int(chunk), int(corrects), unit, with_g, state.data() != nullptr, wants_final,
                  !bounds.empty());
    return text;
  }

  // Values and gradients, first without a trail between them, then with one. `wrong` says what no comparison shows.
  Outcome run(const innerloop::Core& core, std::string& wrong) const {
    Outcome outcome;
    for (const bool trailed : {false, true}) {
      ScalarCall call = prepared();
      Block trail(trailed ? core.scratch(&call, 2) : 0);
      if (trailed) call.trail = trail.data();
      const std::string suffix = trailed ? " after a trail" : "";
      add_values(call, outcome, suffix, trailed);
      if (!run_jobs(core, &call, 0)) wrong = "values wrote in front of their scratch";
      call.state = state.data();
      add_gradients(call, outcome, suffix);
      if (!run_jobs(core, &call, 1)) wrong = "gradients wrote in front of their scratch";
      if (!trail.intact()) wrong = "values wrote in front of their trail";
    }
    check_written(outcome, wrong, bounds.empty());
    return outcome;
  }

 private:
  ScalarCall prepared() const {
    ScalarCall call{};
    const int64_t jobs = sequences * ((heads + together - 1) / together);
    call.header = {jobs, 1, sequences, length, bounds.empty() ? nullptr : bounds.data()};
    call.corrects = corrects, call.key_heads = key_heads, call.heads = heads, call.key_width = key_width;
    call.width = width, call.together = together, call.chunk = chunk, call.unit = unit, call.wide = wide();
    call.scale = scale, call.q = q.view, call.k = k.view, call.v = v.view, call.g = g.view, call.beta = beta.view;
    call.state = state.data(), call.grad_out = grad_out.view, call.grad_final = grad_final.data();
    call.grad_element = grad_element();
    return call;
  }
  void add_values(ScalarCall& call, Outcome& outcome, const std::string& suffix, bool trailed) const {
    const int64_t size = sequences * heads * key_width * width;
    call.out = add(outcome, "out" + suffix, element, wide(), rows * length * heads * width);
    // Memories that differ in their last bits may be rounded to neighbours in bfloat16.
    if (element == kBrain) outcome.back().slack = 0x1p-9;
    if (!wants_final) return;
    call.final = add(outcome, "final" + suffix, wide_element(), wide(), size);
    // A token may leave its memory where it found it.
    if (!overwrite || trailed || length > 1 || !state.data()) return;
    std::memcpy(call.final, state.data(), state.bytes());
    call.state = call.final;
  }
  void add_gradients(ScalarCall& call, Outcome& outcome, const std::string& suffix) const {
    const int64_t tokens = rows * length * heads;
    const auto want = [&](int which, const char* name, int64_t of, int64_t count) -> void* {
      return wants[which] ? add(outcome, name + suffix, of, wide(), count) : nullptr;
    };
    call.grad_q = want(0, "grad_q", grad_element(), tokens * key_width);
    call.grad_k = want(1, "grad_k", grad_element(), tokens * key_width);
    call.grad_v = want(2, "grad_v", element, tokens * width);
    if (with_g) call.grad_g = want(3, "grad_g", wide_element(), tokens);
    if (corrects) call.grad_beta = want(4, "grad_beta", wide_element(), tokens);
    call.grad_state = want(5, "grad_state", wide_element(), sequences * heads * key_width * width);
  }
};

}  // namespace emulate
