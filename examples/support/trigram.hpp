// The 3-gram model of bytes, with add-one smoothing: the baseline.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <unordered_map>

namespace examples {

// P(c | a b) = (count(a b c) + 1) / (count(a b) + 256), counts of the text it was made from.
class Trigram {
 public:
  explicit Trigram(std::string_view text) {
    for (std::size_t i = 2; i < text.size(); ++i) {
      const std::uint32_t context = pair(text[i - 2], text[i - 1]);
      ++pairs_[context];
      ++triples_[context << 8 | byte(text[i])];
    }
  }

  // In nats.
  double log_probability(char a, char b, char c) const {
    const std::uint32_t context = pair(a, b);
    return std::log((count(triples_, context << 8 | byte(c)) + 1) / (count(pairs_, context) + 256));
  }

  // Mean nats a byte of the text from `begin` on, each after the two before it; begin >= 2.
  double cross_entropy(std::string_view text, std::size_t begin) const {
    double sum = 0;
    for (std::size_t i = begin; i < text.size(); ++i)
      sum -= log_probability(text[i - 2], text[i - 1], text[i]);
    return sum / double(text.size() - begin);
  }

 private:
  using Counts = std::unordered_map<std::uint32_t, double>;

  static std::uint32_t byte(char c) { return static_cast<unsigned char>(c); }
  static std::uint32_t pair(char a, char b) { return byte(a) << 8 | byte(b); }
  static double count(const Counts& counts, std::uint32_t key) {
    const auto found = counts.find(key);
    return found == counts.end() ? 0 : found->second;
  }

  Counts pairs_, triples_;
};

}  // namespace examples
