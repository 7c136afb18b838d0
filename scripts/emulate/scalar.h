// A random call of the core of memories that fade by one number a token.
#pragma once

#include "matrices.h"

namespace emulate {

using innerloop::ScalarCall;

class Scalar final : public Matrices<ScalarCall> {
  int64_t together, corrects;
  Tensor g, beta;

  std::string described_gates() const override {
    char text[80];
    std::snprintf(text, sizeof text, "together=%d corrects=%d g=%d", int(together), int(corrects), g.view.data != nullptr);
    return text;
  }
  double drawn_rate() {
    if (random.chance(0.05)) return 0;
    if (corrects == 1) return 2 * random.uniform() * (unit ? 0.6 : 1);
    return random.chance(0.05) ? double(INFINITY) : std::exp(3 * random.normal());
  }
  void fill_gates(ScalarCall& call) const override {
    call.header.jobs = sequences * ((heads + together - 1) / together);
    call.corrects = corrects, call.together = together, call.g = g.view, call.beta = beta.view;
  }
  void add_gates(ScalarCall& call, Outcome& outcome, const std::string& suffix) const override {
    if (g.view.data) call.grad_g = want(outcome, 3, "grad_g" + suffix, wide_element(), tokens());
    if (corrects) call.grad_beta = want(outcome, 4, "grad_beta" + suffix, wide_element(), tokens());
  }

 public:
  explicit Scalar(uint64_t seed) : Matrices(seed) {
    together = random.between(1, 4), corrects = random.between(0, 2);
    const int64_t own = gate_element();
    if (random.chance(0.7)) g = tensor(rows, length, heads, 0, own, layout(false), decays());
    if (corrects) beta = tensor(rows, length, heads, 0, own, layout(false), [&] { return drawn_rate(); });
  }
};

}  // namespace emulate
