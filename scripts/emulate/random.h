// Numbers that are the same on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace emulate {

// SplitMix64 (Steele et al., 2014).
class Random {
  uint64_t state;

 public:
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t bits() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
  int64_t between(int64_t low, int64_t high) { return low + int64_t(bits() % uint64_t(high - low + 1)); }
  bool chance(double p) { return uniform() < p; }
  int64_t pick(std::initializer_list<int64_t> of) { return of.begin()[between(0, int64_t(of.size()) - 1)]; }
};

// Bounds of sequences in one row, some of them empty, with tokens before and behind that belong to none.
inline std::vector<int64_t> packed(Random& random, int64_t sequences, int64_t length) {
  int64_t at = random.chance(0.3) ? random.between(0, length / 3) : 0;
  std::vector<int64_t> bounds{at};
  for (int64_t n = 1; n <= sequences; ++n) {
    if (n == sequences && random.chance(0.6)) at = length;
    else if (!random.chance(0.2)) at = random.between(at, length);
    bounds.push_back(at);
  }
  return bounds;
}

}  // namespace emulate
