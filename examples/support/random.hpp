// Random numbers that depend on a seed and a position only: the same on every platform, in any order of use.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace examples {

class Random {
 public:
  explicit Random(std::uint64_t seed) : seed_(mix(seed + 0x9e3779b97f4a7c15u)) {}

  // How many numbers have been drawn: another Random of the same seed, moved there, goes on with the next.
  std::uint64_t position() const { return count_; }
  void move_to(std::uint64_t position) { count_ = position; }

  std::uint64_t bits() { return mix(seed_ + 0x9e3779b97f4a7c15u * ++count_); }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double uniform(double lo, double hi) { return lo + (hi - lo) * uniform(); }
  double normal() {  // Box and Muller's polar pair, the first of it
    const double r = std::sqrt(-2 * std::log(1 - uniform()));
    return r * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser (Steele, Lea, Flood 2014)
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  std::uint64_t seed_, count_ = 0;
};

}  // namespace examples
