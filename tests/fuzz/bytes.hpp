// What every fuzz target is made of: a byte string read as choices, and what a violated check throws.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>

namespace fuzz {

// Hands out bytes, and zeros when there are no more, so that a prefix of a string is a string too.
class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint8_t byte() { return next_ < bytes_.size() ? bytes_[next_++] : std::uint8_t(0); }
  int below(int count) { return byte() % count; }
  bool flag() { return byte() % 2 != 0; }
  std::uint64_t word(int size) {  // little-endian
    std::uint64_t value = 0;
    for (int i = 0; i < size; ++i) value |= std::uint64_t(byte()) << (8 * i);
    return value;
  }
  template <class T, std::size_t N>
  T pick(const std::array<T, N>& values) {
    return values[std::size_t(below(int(N)))];
  }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t next_ = 0;
};

// A check that did not hold: a defect of the library, or of the check.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How many strings took each branch, by name.
using Reached = std::map<std::string, int>;

}  // namespace fuzz
