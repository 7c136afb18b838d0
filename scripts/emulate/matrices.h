// A random call of a core whose memory is matrices: what all of them have.
#pragma once

#include "outcome.h"
#include "random.h"

namespace emulate {

using innerloop::kBrain;
using innerloop::kDouble;
using innerloop::kFloat;
using innerloop::kHalf;

template <class Call>
class Matrices {
 public:
  virtual ~Matrices() = default;

  std::string described() const {
    char text[400];
    std::snprintf(text, sizeof text, "B=%d T=%d H=%d G=%d K=%d V=%d element=%d chunk=%d unit=%d state=%d final=%d packed=%d ",
                  int(rows), int(length), int(key_heads), int(heads), int(key_width), int(width), int(element),
                  int(chunk), unit, state.data() != nullptr, wants_final, !bounds.empty());
    return text + described_gates();
  }

  // Values and gradients, first without a trail between them, then with one. `wrong` says what no comparison shows.
  Outcome run(const innerloop::Core& core, std::string& wrong) const {
    Outcome outcome;
    for (const bool trailed : {false, true}) {
      Call call = prepared();
      Block trail(trailed ? core.scratch(&call, 2) : 0);
      if (trailed) call.trail = trail.data();
      const std::string suffix = trailed ? " after a trail" : "";
      call.out = add(outcome, "out" + suffix, element, wide(), rows * length * heads * width);
      // Memories that differ in their last bits may be rounded to neighbours in bfloat16.
      if (element == kBrain) outcome.back().slack = 0x1p-9;
      if (wants_final) add_final(call, outcome, suffix, overwrite && !trailed && length == 1);
      if (!run_jobs(core, &call, 0)) wrong = "values wrote in front of their scratch";
      fill_states(call);
      add_gradients(call, outcome, suffix);
      if (!run_jobs(core, &call, 1)) wrong = "gradients wrote in front of their scratch";
      if (!trail.intact()) wrong = "values wrote in front of their trail";
    }
    check_written(outcome, wrong, bounds.empty());
    return outcome;
  }

 protected:
  Random random;
  int64_t rows, length, key_heads, heads, key_width, width, element, chunk, sequences;
  bool unit, overwrite;
  double scale;
  std::vector<int64_t> bounds;
  Tensor q, k, v, grad_out;
  Block state, grad_final;
  bool wants[8], wants_final;  // of the gradients of q, k, v, of three gates, and of two states

  explicit Matrices(uint64_t seed) : random(seed) {
    draw_sizes();
    draw_bounds();
    draw_tokens();
    wants_final = random.chance(0.7);
    for (bool& one : wants) one = random.chance(0.85);
    // A unit vector of one number has no direction: nothing but rounding is left of its gradient.
    if (unit && key_width == 1) wants[0] = wants[1] = false;
    state = drawn_state(), grad_final = drawn_state();
  }

  // What a core has of its own: sizes and gates; a second state; gradients of the gates.
  virtual std::string described_gates() const = 0;
  virtual void fill_gates(Call& call) const = 0;
  virtual void add_gates(Call& call, Outcome& outcome, const std::string& suffix) const = 0;
  virtual void fill_states(Call& call) const {
    call.state = state.data(), call.grad_final = grad_final.data();
  }
  virtual void add_final(Call& call, Outcome& outcome, const std::string& suffix, bool in_place) const {
    call.final = final_of(outcome, "final" + suffix);
    if (in_place && state.data()) call.state = moved(state, call.final);
  }

  bool wide() const { return element == kDouble; }
  int64_t wide_element() const { return wide() ? kDouble : kFloat; }
  // Gradients of keys that several heads share are summed afterwards.
  int64_t shared_element(int64_t own) const { return heads > key_heads ? wide_element() : own; }
  int64_t tokens() const { return rows * length * heads; }
  int64_t state_size() const { return sequences * heads * key_width * width; }

  Layout layout(bool gradient) {
    const int64_t last = gradient ? int64_t(Layout::expanded) : int64_t(Layout::apart);
    return Layout(random.between(0, last));
  }
  int64_t gate_element() { return random.chance(0.5) ? element : wide_element(); }
  // e^g of a gate, in [0, 1].
  std::function<double()> decays() {
    const double rate = random.pick({1, 10, 1000}) * 0.05;
    return [this, rate] {
      if (random.chance(0.03)) return -double(INFINITY);
      return random.chance(0.05) ? 0 : -rate * random.uniform();
    };
  }
  Block drawn_state() {
    if (random.chance(0.4)) return Block();
    return numbers(state_size(), wide_element(), [&] { return random.normal(); });
  }
  void* final_of(Outcome& outcome, const std::string& name) const {
    return add(outcome, name, wide_element(), wide(), state_size());
  }
  // A token may leave its memory where it found it.
  static const void* moved(const Block& from, void* to) { return std::memcpy(to, from.data(), from.bytes()); }
  // Room for a gradient, if it is wanted.
  void* want(Outcome& outcome, int which, const std::string& name, int64_t of, int64_t count) const {
    return wants[which] ? add(outcome, name, of, wide(), count) : nullptr;
  }

 private:
  void draw_sizes() {
    element = random.pick({kFloat, kFloat, kDouble, kBrain, kHalf});
    key_width = random.pick({1, 7, 16, 17, 33, 64}), width = random.pick({1, 7, 16, 17, 33, 64});
    // A wide memory is seldom a long one, for the emulator's sake.
    length = random.chance(0.2) ? 1 : random.between(1, key_width * width > 1100 && random.chance(0.7) ? 35 : 70);
    rows = random.between(1, 2), key_heads = random.between(1, 2), heads = key_heads * random.pick({1, 1, 2, 3});
    if (key_width * width * length > 20000) rows = 1, heads = key_heads * (heads > key_heads ? 2 : 1);
    chunk = random.pick({1, 5, 16, 17, 32, 32, 64});
    unit = random.chance(0.5), overwrite = random.chance(0.3);
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
  Call prepared() const {
    Call call{};
    call.header = {sequences * heads, 1, sequences, length, bounds.empty() ? nullptr : bounds.data()};
    call.key_heads = key_heads, call.heads = heads, call.key_width = key_width, call.width = width;
    call.chunk = chunk, call.unit = unit, call.wide = wide(), call.scale = scale;
    call.q = q.view, call.k = k.view, call.v = v.view, call.grad_out = grad_out.view;
    call.grad_element = shared_element(element);
    fill_states(call);
    fill_gates(call);
    return call;
  }
  void add_gradients(Call& call, Outcome& outcome, const std::string& suffix) const {
    call.grad_q = want(outcome, 0, "grad_q" + suffix, shared_element(element), tokens() * key_width);
    call.grad_k = want(outcome, 1, "grad_k" + suffix, shared_element(element), tokens() * key_width);
    call.grad_v = want(outcome, 2, "grad_v" + suffix, element, tokens() * width);
    call.grad_state = want(outcome, 6, "grad_state" + suffix, wide_element(), state_size());
    add_gates(call, outcome, suffix);
  }
};

}  // namespace emulate
