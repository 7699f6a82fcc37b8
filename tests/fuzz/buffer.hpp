// A strided array in memory of exactly its size, whose gaps must stay as they are.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../support/oracle.hpp"

namespace fuzz {

using test::Array;
using test::Index;

// How an array lies in memory, all of it chosen by one byte.
struct Layout {
  int gap = 0;           // elements after each row, and after each of its repetitions
  bool other = false;    // tokens and heads, or batches, are exchanged
  int broadcast = -1;    // the dimension of stride 0; an output has none, nor where rows must be contiguous
  bool shifted = false;  // starts one element into its memory
  bool strange = false;  // null where there are no elements; meaningless strides of dimensions of size 1

  explicit Layout(std::uint8_t byte = 0) {
    if (byte % 2 == 0) return;  // dense
    gap = std::array{0, 1, 3, 0}[byte >> 1 & 3];
    other = byte >> 3 & 1;
    broadcast = std::array{-1, 0, 1, 2}[byte >> 4 & 3];
    shifted = byte >> 6 & 1;
    strange = byte >> 7 & 1;
  }
};

template <class T, std::size_t Rank>
class Buffer {
 public:
  std::array<Index, Rank> shape{}, stride{};
  std::vector<T> memory;

  Buffer() = default;  // absent
  Buffer(const std::vector<Index>& sizes, Layout layout, bool output, bool contiguous_rows = Rank != 3)
      : present_(true) {
    std::copy(sizes.begin(), sizes.end(), shape.begin());
    std::array<std::size_t, Rank> inner_first;
    for (std::size_t d = 0; d < Rank; ++d) inner_first[d] = Rank - 1 - d;
    if constexpr (Rank > 2)
      if (layout.other) std::swap(inner_first[1], inner_first[contiguous_rows ? 2 : 0]);
    Index extent = 1;
    for (const std::size_t d : inner_first) {
      const bool repeats = !output && layout.broadcast == int(d) && !(contiguous_rows && d == Rank - 1);
      stride[d] = repeats ? 0 : extent;
      if (!repeats) extent = extent * std::max<Index>(shape[d], 1) + (d == 0 ? 0 : layout.gap);
      if (layout.strange && shape[d] == 1) stride[d] = d % 2 == 0 ? -(Index(1) << 40) : Index(1) << 40;
    }
    begin_ = layout.shifted;
    Index last = 0;
    for (std::size_t d = 0; d < Rank; ++d) {
      empty_ |= shape[d] == 0;
      if (shape[d] > 1) last += (shape[d] - 1) * stride[d];
    }
    null_ = empty_ && layout.strange && shape != decltype(shape){};
    memory.assign(std::size_t(begin_ + (empty_ ? 1 : last + 1)), gap_value(output));
  }

  bool present() const { return present_; }
  bool empty() const { return !present_ || empty_; }
  template <class View>
  View view() {
    if (!present_) return {};
    return View(null_ ? nullptr : memory.data() + begin_, shape, stride);
  }

  // visit(index of the dense array, element)
  template <class Visit>
  void for_each(const Visit& visit) {
    if (empty()) return;
    std::array<Index, Rank> at{};
    for (std::size_t i = 0;; ++i) {
      Index offset = begin_;
      for (std::size_t d = 0; d < Rank; ++d) offset += at[d] * (shape[d] == 1 ? 0 : stride[d]);
      visit(i, memory[std::size_t(offset)]);
      std::size_t d = Rank;
      while (d-- > 0 && ++at[d] == shape[d]) at[d] = 0;
      if (d == std::size_t(-1)) return;
    }
  }
  template <class Scalar>
  void set(const Array<Scalar>& values) {
    for_each([&](std::size_t i, T& x) { x = static_cast<T>(values.values[i]); });
  }
  template <class Scalar>
  Array<Scalar> get() {
    if (!present_) return {};
    Array<Scalar> out = examples::zeros<Scalar>({shape.begin(), shape.end()});
    for_each([&](std::size_t i, T& x) { out.values[i] = static_cast<Scalar>(x); });
    return out;
  }

  // What a call is to leave alone: everything, or what lies between the elements.
  void remember() { before_ = memory; }
  bool unchanged() const { return same_bits(memory, before_); }
  bool gaps_unchanged() const {
    Buffer now = *this, then = *this;
    then.memory = before_;
    const auto blank = [](std::size_t, T& x) { x = T(0); };
    now.for_each(blank);
    then.for_each(blank);
    return same_bits(now.memory, then.memory);
  }

  static bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
  }

 private:
  // A NaN that is read shows; so does a 42 that is gone.
  static T gap_value(bool output) { return output ? T(42) : std::numeric_limits<T>::quiet_NaN(); }

  bool present_ = false, empty_ = false, null_ = false;
  Index begin_ = 0;
  std::vector<T> before_;
};

}  // namespace fuzz
