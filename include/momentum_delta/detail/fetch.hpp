/// \file
/// Memory that is fetched before it is used.
#pragma once

#include <algorithm>
#include <cstdint>

#include "momentum_delta/detail/panel.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// Fetches rows that will be read or written soon, a few lines at a time between tiles: rows of one head among
// others lie too far apart for the processor to foresee them, and more at once than it keeps track of would
// hold up what is computed meanwhile.
template <class Storage>
class Fetch {
 public:
  // Columns [column, column + columns) of the rows [t, t + n), as far as there are so many. Up to eight such
  // blocks; the last one added is fetched first.
  template <class Map>
  void add(const Map& rows, Index t, Index n, Index column, Index columns) {
    n = std::min(n, rows.rows() - t);
    if (n <= 0 || columns <= 0) return;
    const Storage* const data = rows.data() + t * rows.outerStride() + column;
    const Index into_line = Index(reinterpret_cast<std::uintptr_t>(data) % 64 / sizeof(Storage));
    pending_[count_++] = {data, rows.outerStride(), columns, into_line, n};
  }
  // The next so many lines.
  void some(int lines = 8) {
    for (; lines > 0 && count_ > 0; --lines) {
      Rows& rows = pending_[count_ - 1];
      prefetch(rows.data + std::min(column_, rows.columns - 1));
      column_ += line;
      if (column_ < rows.columns + rows.into_line) continue;
      column_ = 0;
      rows.data += rows.stride;
      if (--rows.count == 0) --count_;
    }
  }

 private:
  static constexpr Index line = std::max<Index>(1, 64 / Index(sizeof(Storage)));
  struct Rows {
    const Storage* data;
    Index stride, columns, into_line, count;  // into_line: of the first row's start; it may touch a line more
  };
  Rows pending_[8];
  int count_ = 0;
  Index column_ = 0;
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
