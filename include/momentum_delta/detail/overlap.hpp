/// \file
/// Which bytes a strided view touches, and whether two views touch a common one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "momentum_delta/views.hpp"

namespace momentum_delta::detail {

// Can an Index count the bytes from the first element to past the last, with room to spare? Sizes and strides
// >= 0. Nothing below overflows then. (In double, which rounds but does not overflow, and does not divide.)
template <class Scalar, std::size_t Rank>
bool addressable(const StridedView<Scalar, Rank>& view) {
  if (view.empty()) return true;
  double elements = 1;
  for (std::size_t d = 0; d < Rank; ++d) elements += double(view.shape[d] - 1) * double(view.stride[d]);
  return elements * double(sizeof(Scalar)) < 0x1p62;
}

// Runs of `run` contiguous bytes; level d repeats what is below it `count[d]` times, `stride[d]` bytes apart.
// Levels of one repetition are dropped and the others sorted, largest stride first.
struct Footprint {
  std::uintptr_t begin = 0;
  Index run = 0;  // 0: touches nothing
  std::size_t levels = 0;
  static constexpr std::size_t max_levels = 4;
  std::array<Index, max_levels> count, stride;  // of the levels that there are
  std::array<Index, max_levels + 1> extent;  // bytes from the first to past the last, of levels d and below

  Footprint() = default;
  template <class Scalar, std::size_t Rank>
  explicit Footprint(const StridedView<Scalar, Rank>& view)
      : begin(reinterpret_cast<std::uintptr_t>(view.data)) {
    if (std::find(view.shape.begin(), view.shape.end(), 0) != view.shape.end()) return;
    constexpr Index bytes = sizeof(Scalar);
    run = bytes;
    std::array<std::pair<Index, Index>, Rank> level;
    for (std::size_t d = 0; d < Rank; ++d) {
      const bool once = view.shape[d] == 1;  // such a stride means nothing, and may be anything
      level[d] = {once ? 0 : view.stride[d] * bytes, view.shape[d]};
    }
    std::sort(level.begin(), level.end());
    std::size_t first = 0;  // levels that only lengthen the contiguous run
    while (first < Rank && (level[first].second == 1 || level[first].first <= run)) {
      run = std::max(run, level[first].first * (level[first].second - 1) + run);
      ++first;
    }
    for (std::size_t d = Rank; d-- > first;) {
      if (level[d].second == 1) continue;
      stride[levels] = level[d].first;
      count[levels++] = level[d].second;
    }
    extent[levels] = run;
    for (std::size_t d = levels; d-- > 0;) extent[d] = extent[d + 1] + stride[d] * (count[d] - 1);
  }

  // Is any of the bytes [lo, hi) touched, taking levels d and below to start at `at`?
  bool touches(std::uintptr_t lo, std::uintptr_t hi, std::uintptr_t at, std::size_t d = 0) const {
    const Index from = Index(lo - at), to = Index(hi - at);  // relative to `at`, may be negative
    if (run == 0 || to <= 0 || from >= extent[d]) return false;
    if (d == levels || d == max_levels) return true;  // the second is for compilers that cannot see the first
    const Index first = std::max<Index>(0, from - extent[d + 1] + 1);
    const Index i0 = (first + stride[d] - 1) / stride[d], i1 = std::min(count[d] - 1, (to - 1) / stride[d]);
    for (Index i = i0; i <= i1; ++i) {
      if (touches(lo, hi, at + std::uintptr_t(i * stride[d]), d + 1)) return true;
    }
    return false;
  }

  template <class Visit>  // visit(lo) for the start of every run, until one returns true
  bool any_run(const Visit& visit, std::uintptr_t at, std::size_t d = 0) const {
    if (d == levels || d == max_levels) return visit(at);
    for (Index i = 0; i < count[d]; ++i) {
      if (any_run(visit, at + std::uintptr_t(i * stride[d]), d + 1)) return true;
    }
    return false;
  }
};

inline bool overlap(const Footprint& a, const Footprint& b) {
  if (a.run == 0 || b.run == 0) return false;
  if (!b.touches(a.begin, a.begin + std::uintptr_t(a.extent[0]), b.begin)) return false;  // usual, and cheap
  return a.any_run([&](std::uintptr_t lo) { return b.touches(lo, lo + std::uintptr_t(a.run), b.begin); },
                   a.begin);
}

// Does every element have memory of its own? Sufficient and what array libraries produce: each stride steps
// over all that is below it.
template <class Scalar, std::size_t Rank>
bool distinct_elements(const StridedView<Scalar, Rank>& view) {
  if (std::find(view.shape.begin(), view.shape.end(), 0) != view.shape.end()) return true;
  std::array<std::pair<Index, Index>, Rank> level;
  for (std::size_t d = 0; d < Rank; ++d) level[d] = {view.stride[d], view.shape[d]};
  std::sort(level.begin(), level.end());
  Index extent = 1;
  for (const auto& [stride, count] : level) {
    if (count == 1) continue;
    if (stride < extent) return false;
    extent += stride * (count - 1);
  }
  return true;
}

}  // namespace momentum_delta::detail
