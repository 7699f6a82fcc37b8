// Batches of bytes of a text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include "model.hpp"

namespace examples {

// Throws std::runtime_error if the file cannot be read.
inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  if (!in || in.bad()) throw std::runtime_error("cannot read " + path);
  return text;
}

// Tells texts apart: FNV-1a, 64 bits.
inline std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// Appends a sequence of T tokens from text[begin] on, each with the byte after it as its target. Where the
// text ends there are tokens of 0 that do not count.
inline void append_window(Batch& batch, std::string_view text, std::size_t begin) {
  for (std::size_t i = begin; i < begin + std::size_t(batch.T); ++i) {
    const bool inside = i + 1 < text.size();
    batch.tokens.push_back(inside ? static_cast<unsigned char>(text[i]) : 0);
    batch.targets.push_back(inside ? static_cast<unsigned char>(text[i + 1]) : -1);
  }
  ++batch.B;
}

// B windows of T tokens from anywhere in the text, which has more than T bytes.
inline Batch random_windows(std::string_view text, Index B, Index T, Random& random) {
  Batch batch{.B = 0, .T = T, .tokens = {}, .targets = {}};
  for (Index b = 0; b < B; ++b) append_window(batch, text, random.bits() % (text.size() - std::size_t(T)));
  return batch;
}

// The mean loss over text[begin, end) in nats a byte, each byte in a window of T of them that starts anew;
// B windows at a time. begin >= 1.
template <class Scalar>
double loss_in_windows(Model<Scalar>& model, std::string_view text, std::size_t begin, Index B, Index T,
                       const md::Options& rule) {
  double sum = 0;
  for (std::size_t at = begin - 1; at + 1 < text.size();) {
    Batch batch{.B = 0, .T = T, .tokens = {}, .targets = {}};
    for (; batch.B < B && at + 1 < text.size(); at += std::size_t(T)) append_window(batch, text, at);
    const Score score = model.evaluate(batch, rule);
    sum += score.loss * double(score.counted);
  }
  return sum / double(text.size() - begin);
}

// The same of the text as one sequence, each byte after all before it: `segment` tokens at a time, whose
// state the next ones continue from.
template <class Scalar>
double loss_in_one_sequence(Model<Scalar>& model, std::string_view text, std::size_t begin,
                            const md::Options& rule, Index segment = 4096) {
  double sum = 0;
  typename Model<Scalar>::Cache cache = model.make_cache();
  for (std::size_t at = begin - 1; at + 1 < text.size(); at += std::size_t(segment)) {
    Batch batch{.B = 0, .T = std::min(segment, Index(text.size() - 1 - at)), .tokens = {}, .targets = {}};
    append_window(batch, text, at);
    const Score score = model.evaluate(batch, rule, &cache);
    sum += score.loss * double(score.counted);
  }
  return sum / double(text.size() - begin);
}

}  // namespace examples
