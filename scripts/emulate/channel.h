// A random call of the core of memories that fade channel by channel.
#pragma once

#include "matrices.h"

namespace emulate {

using innerloop::ChannelCall;

class Channel final : public Matrices<ChannelCall> {
  enum : int64_t { kAdd, kDelta, kDecoupled, kGeneralized };
  int64_t kind;
  Tensor g, first, second;

  std::string described_gates() const override {
    char text[80];
    std::snprintf(text, sizeof text, "kind=%d g=%d", int(kind), g.view.data != nullptr);
    return text;
  }
  void draw_gates() {
    const double size = 1 / std::sqrt(double(key_width));
    const auto part = [&] { return random.chance(0.05) ? 0 : random.uniform(); };
    const auto make = [&](int64_t of, int64_t columns, const std::function<double()>& draw) {
      return tensor(rows, length, of, columns, gate_element(), layout(false), draw);
    };
    if (random.chance(0.85)) g = make(heads, key_width, decays());
    if (kind == kDelta) first = make(heads, 0, [&] { return 2 * part() * (unit ? 0.6 : 1); });
    if (kind > kDelta) first = make(heads, key_width, part);
    if (kind == kDecoupled) second = make(heads, width, part);
    // What is erased has no length above one.
    if (kind == kGeneralized) second = make(key_heads, key_width, [&] { return size * (2 * random.uniform() - 1); });
  }
  int64_t second_element() const { return kind == kGeneralized ? shared_element(second.view.element) : second.view.element; }
  void fill_gates(ChannelCall& call) const override {
    call.kind = kind, call.g = g.view, call.first = first.view, call.second = second.view;
    call.kappa_element = second_element();
  }
  void add_gates(ChannelCall& call, Outcome& outcome, const std::string& suffix) const override {
    const int64_t each = kind == kDelta ? 1 : key_width, other = kind == kDecoupled ? width : key_width;
    if (g.view.data) call.grad_g = want(outcome, 3, "grad_g" + suffix, g.view.element, tokens() * key_width);
    if (kind > kAdd) call.grad_first = want(outcome, 4, "grad_first" + suffix, first.view.element, tokens() * each);
    if (kind > kDelta) call.grad_second = want(outcome, 5, "grad_second" + suffix, second_element(), tokens() * other);
  }

 public:
  explicit Channel(uint64_t seed) : Matrices(seed) {
    kind = random.between(kAdd, kGeneralized);
    draw_gates();
  }
};

}  // namespace emulate
