// What a call wrote, and how far that is from what the same call wrote elsewhere.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "call.h"
#include "tensor.h"

namespace emulate {

struct Output {
  std::string name;
  int64_t element;
  bool wide;  // computed in float64
  Block block;
  double slack = 0;  // more of the largest number: it was rounded on the way
};
using Outcome = std::vector<Output>;

// A tolerance on the difference relative to the largest number, or to one: inputs are of that size, and what is smaller
// is left of numbers that cancelled. A rounding of the element is granted beside it.
inline double tolerance(const Output& x) { return x.wide ? 1e-12 : 1e-5; }
inline double rounding(int64_t element) {
  return element == innerloop::kBrain ? 0x1p-7 : element == innerloop::kHalf ? 0x1p-10 : 0;
}

// The largest difference in tolerances, infinite where one is NaN and the other not.
inline double distance(const Output& a, const Output& b) {
  const int64_t count = a.block.bytes() / size_of(a.element);
  double most = 1, worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = std::fabs(get(a.block.data(), a.element, i));
    if (std::isfinite(x) && x > most) most = x;
  }
  for (int64_t i = 0; i < count; ++i) {
    const double x = get(a.block.data(), a.element, i), y = get(b.block.data(), b.element, i);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    const double off = std::fabs(x - y) / ((tolerance(a) + a.slack) * most + rounding(a.element) * std::fabs(x));
    if (!(off <= worst)) worst = std::isfinite(off) ? off : INFINITY;
  }
  return worst;
}

// Run all jobs of a call, each in scratch that holds NaN; false if one wrote in front of its memory.
inline bool run_jobs(const innerloop::Core& core, const void* call, int64_t way) {
  Block scratch(core.scratch(call, way));
  const int64_t jobs = static_cast<const innerloop::Header*>(call)->jobs;
  bool intact = true;
  for (int64_t job = 0; job < jobs; ++job) {
    scratch.clear();
    core.run(call, way, job, scratch.data());
    intact = intact && scratch.intact();
  }
  return intact;
}

// Room for what a call writes.
inline void* add(Outcome& outcome, const std::string& name, int64_t element, bool wide, int64_t count) {
  outcome.push_back({name, element, wide, Block(count * size_of(element))});
  return outcome.back().block.data();
}

// No result may have been written in front of its memory and, where the call owes every number, none may be NaN.
inline void check_written(const Outcome& outcome, std::string& wrong, bool every) {
  for (const Output& x : outcome) {
    bool missing = false;
    for (int64_t i = 0; i < x.block.bytes() / size_of(x.element); ++i)
      missing = missing || std::isnan(get(x.block.data(), x.element, i));
    if (!x.block.intact()) wrong = x.name + " was written in front of its memory";
    if (every && missing) wrong = x.name + " has NaN";
  }
}

}  // namespace emulate
