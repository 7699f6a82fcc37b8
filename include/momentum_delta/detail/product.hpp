// Matrix products and loops cut into tasks whose bits do not depend on who runs them.
#pragma once

#include <algorithm>

#include "momentum_delta/executor.hpp"

namespace momentum_delta::detail {

// f(i) for each 0 <= i < count, in any order, through the executor if there is one.
template <class F>
void for_each_index(Executor* executor, Index count, const F& f) {
  const auto task = [&](Index i, int) { f(i); };
  if (executor)
    executor->run(count, task);
  else
    SerialExecutor().run(count, task);
}

// to = a b, or to += a b: matrices or expressions of Eigen's, `to` writable. The longer side of `to` is cut
// into tasks.
template <class To, class A, class B>
void product(Executor* executor, To to, const A& a, const B& b, bool add = false) {
  constexpr Index block = 128;
  const bool by_rows = to.rows() >= to.cols();
  const Index size = by_rows ? to.rows() : to.cols();
  for_each_index(executor, (size + block - 1) / block, [&](Index i) {
    const Index begin = i * block, count = std::min(block, size - begin);
    const auto assign = [&](auto part, const auto& value) {
      if (add)
        part.noalias() += value;
      else
        part.noalias() = value;
    };
    if (by_rows)
      assign(to.middleRows(begin, count), a.middleRows(begin, count) * b);
    else
      assign(to.middleCols(begin, count), a * b.middleCols(begin, count));
  });
}

}  // namespace momentum_delta::detail
