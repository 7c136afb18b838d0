// A random call of the core of the memory that moves with momentum.
#pragma once

#include "matrices.h"

namespace emulate {

using innerloop::MomentumCall;

class Momentum final : public Matrices<MomentumCall> {
  Tensor theta, eta, alpha;
  Block momentum, grad_moved;

  std::string described_gates() const override { return momentum.data() ? "momentum=1" : "momentum=0"; }
  void fill_gates(MomentumCall& call) const override {
    call.theta = theta.view, call.eta = eta.view, call.alpha = alpha.view;
  }
  void fill_states(MomentumCall& call) const override {
    Matrices::fill_states(call);
    call.momentum = momentum.data(), call.grad_final_momentum = grad_moved.data();
  }
  // Both are asked for, or none.
  void add_final(MomentumCall& call, Outcome& outcome, const std::string& suffix, bool in_place) const override {
    Matrices::add_final(call, outcome, suffix, in_place);
    call.final_momentum = final_of(outcome, "final momentum" + suffix);
    if (in_place && momentum.data()) call.momentum = moved(momentum, call.final_momentum);
  }
  void add_gates(MomentumCall& call, Outcome& outcome, const std::string& suffix) const override {
    call.grad_theta = want(outcome, 3, "grad_theta" + suffix, wide_element(), tokens());
    call.grad_eta = want(outcome, 4, "grad_eta" + suffix, wide_element(), tokens());
    call.grad_alpha = want(outcome, 5, "grad_alpha" + suffix, wide_element(), tokens());
    call.grad_momentum = want(outcome, 7, "grad_momentum" + suffix, wide_element(), state_size());
  }

 public:
  explicit Momentum(uint64_t seed) : Matrices(seed) {
    const auto gate = [&](double least, double most) {
      return tensor(rows, length, heads, 0, gate_element(), layout(false), [&, least, most] {
        return random.chance(0.05) ? least : random.chance(0.05) ? most : least + (most - least) * random.uniform();
      });
    };
    theta = gate(0, 1), eta = gate(0, 1), alpha = gate(0, random.chance(0.5) ? 1 : 0.1);
    momentum = drawn_state(), grad_moved = drawn_state();
  }
};

}  // namespace emulate
