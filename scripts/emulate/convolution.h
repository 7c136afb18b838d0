// A random call of the short convolution over time.
#pragma once

#include "outcome.h"
#include "random.h"

namespace emulate {

using innerloop::ConvolutionCall;
using innerloop::kBrain;
using innerloop::kDouble;
using innerloop::kFloat;
using innerloop::kHalf;

class Convolution {
  Random random;
  int64_t rows, length, channels, taps, sequences, tokens, windows, element;
  bool silu;
  std::vector<int64_t> bounds;
  Tensor x, grad_out;
  Block weight, bias, window, grad_after;

  int64_t wide_element() const { return element == kDouble ? kDouble : kFloat; }
  int64_t shares() const { return (rows * length + tokens - 1) / tokens; }

 public:
  explicit Convolution(uint64_t seed) : random(seed) {
    element = random.pick({kFloat, kFloat, kDouble, kBrain, kHalf});
    rows = random.between(1, 2), length = random.between(1, 40), channels = random.pick({1, 7, 16, 17, 33, 64, 130});
    taps = random.pick({2, 3, 4, 4, 4, 6}), tokens = random.pick({1, 5, 16, 64}), windows = random.between(1, 3);
    silu = random.chance(0.6), sequences = rows;
    if (random.chance(0.35)) rows = 1, sequences = random.between(1, 4), bounds = packed(random, sequences, length);
    const auto draw = [&] { return random.normal(); };
    x = tensor(rows, length, 1, channels, element, Layout(random.pick({0, 2})), draw);
    grad_out = tensor(rows, length, 1, channels, element, Layout(random.pick({0, 2, 3})), draw);
    weight = numbers(taps * channels, wide_element(), draw);
    if (random.chance(0.6)) bias = numbers(channels, wide_element(), draw);
    window = numbers(sequences * (taps - 1) * channels, wide_element(), draw);
    if (random.chance(0.6)) grad_after = numbers(sequences * (taps - 1) * channels, wide_element(), draw);
  }

  std::string described() const {
    char text[200];
    std::snprintf(text, sizeof text, "convolution B=%d T=%d C=%d W=%d element=%d tokens=%d windows=%d silu=%d packed=%d",
                  int(rows), int(length), int(channels), int(taps), int(element), int(tokens), int(windows), silu,
                  !bounds.empty());
    return text;
  }

  Outcome run(const innerloop::Core& core, std::string& wrong) const {
    const bool wide = element == kDouble;
    const int64_t size = rows * length * channels, before = sequences * (taps - 1) * channels;
    ConvolutionCall call{};
    call.header = {shares() + (sequences + windows - 1) / windows, 1, sequences, length,
                   bounds.empty() ? nullptr : bounds.data()};
    call.rows = rows, call.channels = channels, call.taps = taps, call.shares = shares(), call.tokens = tokens;
    call.windows = windows, call.silu = silu, call.wide = wide, call.x = x.view, call.weight = weight.data();
    call.bias = bias.data(), call.window = window.data(), call.grad_out = grad_out.view;
    call.grad_after = grad_after.data();
    Outcome outcome;
    call.out = add(outcome, "out", element, wide, size);
    call.after = add(outcome, "after", wide_element(), wide, before);
    if (!run_jobs(core, &call, 0)) wrong = "values wrote in front of their scratch";
    call.grad_x = add(outcome, "grad_x", element, wide, size);
    call.grad_window = add(outcome, "grad_window", wide_element(), wide, before);
    call.grad_weight = add(outcome, "grad_weight", wide_element(), wide, shares() * (taps + 1) * channels);
    if (!run_jobs(core, &call, 1)) wrong = "gradients wrote in front of their scratch";
    check_written(outcome, wrong, bounds.empty());
    return outcome;
  }
};

}  // namespace emulate
