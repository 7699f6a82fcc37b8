/// \file
/// Memory that is fetched before it is used.
#pragma once

#include "momentum_delta/detail/panel.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// Fetches rows that will be read or written soon, a few lines at a time between tiles: rows of one head among
// others lie too far apart for the processor to foresee them, and more at once than it keeps track of would
// hold up what is computed meanwhile.
template <class Storage>
class Fetch {
 public:
  // Columns [column, column + columns) of the rows [t, t + n), as far as there are so many.
  template <class Map>
  void add(const Map& rows, Index t, Index n, Index column, Index columns) {
    n = std::min(n, rows.rows() - t);
    if (n > 0)
      pending_[count_++] = {rows.data() + t * rows.outerStride() + column, rows.outerStride(), columns, n};
  }
  void some(int lines = 8) {
    for (; lines > 0 && count_ > 0; --lines) {
      Rows& rows = pending_[count_ - 1];
      prefetch(rows.data + column_);
      column_ += line;
      if (column_ < rows.columns) continue;
      column_ = 0;
      rows.data += rows.stride;
      if (--rows.count == 0) --count_;
    }
  }

 private:
  static constexpr Index line = std::max<Index>(1, 64 / Index(sizeof(Storage)));
  struct Rows {
    const Storage* data;
    Index stride, columns, count;
  };
  Rows pending_[8];
  int count_ = 0;
  Index column_ = 0;
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
