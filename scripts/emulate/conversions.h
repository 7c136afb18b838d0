// Every number of sixteen bits through a token, widened, scaled and rounded again.
#pragma once

#include "outcome.h"
#include "random.h"

namespace emulate {

class Conversions {
  static constexpr int64_t kWidth = 1000, kNumbers = 1 << 16;
  int64_t element;
  double scale;

 public:
  explicit Conversions(uint64_t seed) {
    Random random(seed);
    element = random.pick({innerloop::kBrain, innerloop::kHalf});
    scale = random.chance(0.3) ? 1 : std::exp(3 * random.normal());
  }
  std::string described() const {
    char text[80];
    std::snprintf(text, sizeof text, "conversions element=%d scale=%.17g", int(element), scale);
    return text;
  }

  Outcome run(const innerloop::Core& core, std::string& wrong) const {
    const int64_t heads = (kNumbers + kWidth - 1) / kWidth, size = heads * kWidth;
    const auto one = [] { return 1.0; };
    Block v(2 * size);
    for (int64_t i = 0; i < size; ++i) reinterpret_cast<uint16_t*>(v.data())[i] = uint16_t(i);
    const Tensor key = tensor(1, 1, 1, 1, element, Layout::tokens, one);
    Outcome outcome;
    void* out = add(outcome, "out", element, false, size);
    innerloop::ScalarCall call{};
    call.header = {heads, 1, 1, 1, nullptr};
    call.key_heads = 1, call.heads = heads, call.key_width = 1, call.width = kWidth, call.together = 1, call.chunk = 1;
    call.scale = scale, call.q = call.k = key.view, call.v = {v.data(), size, size, kWidth, 1, element};
    call.out = out;
    if (!run_jobs(core, &call, 0)) wrong = "values wrote in front of their scratch";
    if (scale == 1) check_identity(v, outcome[0].block, wrong);
    return outcome;
  }

 private:
  void check_identity(const Block& from, const Block& to, std::string& wrong) const {
    const auto bits = [](const Block& x, int64_t i) { return reinterpret_cast<const uint16_t*>(x.data())[i]; };
    const double least = element == innerloop::kBrain ? 0x1p-126 : 0;  // below it bfloat16 is denormal, and zero here
    for (int64_t i = 0; i < from.bytes() / 2; ++i) {
      const double value = get(from.data(), element, i), found = get(to.data(), element, i);
      const bool small = std::fabs(value) < least && found == 0;
      const bool same = bits(from, i) == bits(to, i) || (std::isnan(value) && std::isnan(found));
      if (!same && !small) wrong = "a number came back as another";
    }
  }
};

}  // namespace emulate
