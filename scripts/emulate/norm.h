// A random call of the norm of rows, with a gate or without.
#pragma once

#include "outcome.h"
#include "random.h"

namespace emulate {

using innerloop::kBrain;
using innerloop::kDouble;
using innerloop::kFloat;
using innerloop::kHalf;
using innerloop::NormCall;

class Norm {
  Random random;
  int64_t rows, length, heads, width, share, element, measure, activation;
  bool gated, gate_first;
  double eps;
  Tensor x, gate, grad_out;
  Block weight;

  int64_t wide_element() const { return element == kDouble ? kDouble : kFloat; }
  int64_t count() const { return rows * length * heads; }
  int64_t jobs() const { return (count() + share - 1) / share; }
  Layout layout(Layout last) { return Layout(random.between(0, int64_t(last))); }

 public:
  explicit Norm(uint64_t seed) : random(seed) {
    element = random.pick({kFloat, kFloat, kDouble, kBrain, kHalf});
    // The gradient of a row of one number is nothing but rounding.
    rows = random.between(1, 2), length = random.between(1, 9), heads = random.between(1, 3);
    width = random.pick({2, 7, 16, 17, 33, 64, 130}), share = random.between(1, 20), measure = random.between(0, 2);
    gated = random.chance(0.7), gate_first = random.chance(0.5), activation = gated ? random.between(1, 2) : 0;
    eps = random.pick({1, 100, 100000}) * 1e-8;
    const auto draw = [&] { return 2 * random.normal(); };
    x = tensor(rows, length, heads, width, element, layout(Layout::apart), draw);
    if (gated) gate = tensor(rows, length, heads, width, element, layout(Layout::apart), draw);
    grad_out = tensor(rows, length, heads, width, element, layout(Layout::expanded), draw);
    if (random.chance(0.7)) weight = numbers(width, wide_element(), draw);
  }

  std::string described() const {
    char text[200];
    std::snprintf(text, sizeof text, "norm rows=%d width=%d element=%d measure=%d activation=%d first=%d share=%d",
                  int(count()), int(width), int(element), int(measure), int(activation), int(gate_first), int(share));
    return text;
  }

  Outcome run(const innerloop::Core& core, std::string& wrong) const {
    const bool wide = element == kDouble;
    const int64_t size = count() * width;
    NormCall call{};
    call.header = {jobs(), 1, 0, length, nullptr};
    call.rows = count(), call.heads = heads, call.width = width, call.share = share, call.measure = measure;
    call.activation = activation, call.gate_first = gate_first, call.wide = wide, call.eps = eps;
    call.x = x.view, call.gate = gate.view, call.weight = weight.data(), call.grad_out = grad_out.view;
    Outcome outcome;
    call.out = add(outcome, "out", element, wide, size);
    if (!run_jobs(core, &call, 0)) wrong = "values wrote in front of their scratch";
    call.grad_x = add(outcome, "grad_x", element, wide, size);
    if (gated) call.grad_gate = add(outcome, "grad_gate", element, wide, size);
    call.grad_weight = add(outcome, "grad_weight", wide_element(), wide, jobs() * width);
    if (!run_jobs(core, &call, 1)) wrong = "gradients wrote in front of their scratch";
    check_written(outcome, wrong, true);
    return outcome;
  }
};

}  // namespace emulate
