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

// Rows of panels, at most a line long, that a loop over tokens fetches for the next one: a row of each block at
// each token. Nothing is kept between rows, since the loop has no register for it.
template <class Storage>
class FetchRows {
 public:
  // As of Fetch.
  template <class Map>
  void add(const Map& rows, Index t, Index n, Index column, Index columns) {
    n = std::min(n, rows.rows() - t);
    if (n <= 0 || columns <= 0) return;
    blocks_[count_++] = {rows.data() + t * rows.outerStride() + column, rows.outerStride(), columns - 1,
                         n - 1};
  }
  // The blocks for part `part` of `parts` of a loop: [begin(part, parts), begin(part + 1, parts)).
  int begin(Index part, Index parts) const { return int(part * count_ / parts); }
  // Row i of the blocks [begin, end), the last one where there are fewer.
  EIGEN_ALWAYS_INLINE void row(Index i, int begin, int end) const {
    for (const Block* b = blocks_ + begin; b != blocks_ + end; ++b) {
      const Storage* const row = b->data + std::min(i, b->last_row) * b->stride;
      prefetch(row);
      prefetch(row + b->last_column);  // where it ends, if that is another line
    }
  }

 private:
  struct Block {
    const Storage* data;
    Index stride, last_column, last_row;
  };
  Block blocks_[8];
  int count_ = 0;
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
