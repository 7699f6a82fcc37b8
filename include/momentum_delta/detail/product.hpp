/// \file
/// Matrix products and loops cut into tasks whose bits do not depend on who runs them.
#pragma once

#include <algorithm>

#include "momentum_delta/executor.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// f(i) for each 0 <= i < count, in any order, through the executor if there is one.
template <class F>
void for_each_index(Executor* executor, Index count, const F& f) {
  const auto task = [&](Index i, int) { f(i); };
  if (executor)
    executor->run(count, task);
  else
    SerialExecutor().run(count, task);
}

// A matrix of a product: rows in memory, or their transpose. One type for all, since each combination of
// Eigen's types is a kernel of its own to compile.
template <class Scalar>
struct Factor {
  RowsMap<const Scalar> stored;
  bool transposed = false;

  Index rows() const { return transposed ? stored.cols() : stored.rows(); }
  Index cols() const { return transposed ? stored.rows() : stored.cols(); }
  Factor middle_rows(Index begin, Index count) const { return part(begin, count, !transposed); }
  Factor middle_cols(Index begin, Index count) const { return part(begin, count, transposed); }

 private:
  Factor part(Index begin, Index count, bool of_stored_rows) const {
    const Index stride = stored.outerStride();
    const bool none = stored.size() == 0;  // and perhaps no memory to step over
    const Scalar* const from = stored.data() + (none ? 0 : begin * (of_stored_rows ? stride : 1));
    return {{from, of_stored_rows ? count : stored.rows(), of_stored_rows ? stored.cols() : count,
             Eigen::OuterStride<>(stride)},
            transposed};
  }
};
template <class Map>  // a RowsMap
Factor<typename Map::Scalar> factor(const Map& x, bool transposed = false) {
  return {{x.data(), x.rows(), x.cols(), Eigen::OuterStride<>(x.outerStride())}, transposed};
}

// to = a b, or to += a b; not both transposed. The longer side of `to` is cut into tasks.
template <class Scalar>
void product(Executor* executor, RowsMap<Scalar> to, const Factor<Scalar>& a, const Factor<Scalar>& b,
             bool add = false) {
  constexpr Index block = 128;
  if (to.size() == 0) return;
  const bool by_rows = to.rows() >= to.cols();
  const Index size = by_rows ? to.rows() : to.cols(), stride = to.outerStride();
  for_each_index(executor, (size + block - 1) / block, [&](Index i) {
    const Index begin = i * block, count = std::min(block, size - begin);
    RowsMap<Scalar> part(to.data() + begin * (by_rows ? stride : 1), by_rows ? count : to.rows(),
                         by_rows ? to.cols() : count, Eigen::OuterStride<>(stride));
    const Factor<Scalar> left = by_rows ? a.middle_rows(begin, count) : a;
    const Factor<Scalar> right = by_rows ? b : b.middle_cols(begin, count);
    if (!add) part.setZero();
    if (left.transposed)
      part.noalias() += left.stored.transpose() * right.stored;
    else if (right.transposed)
      part.noalias() += left.stored * right.stored.transpose();
    else
      part.noalias() += left.stored * right.stored;
  });
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
