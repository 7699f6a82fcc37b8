// Products and solves with a lower triangle L of n x n, X of n x V. Only L_tj with j <= t is read, and rows
// never meet what the triangle keeps from them, so a NaN in one row reaches only the rows that depend on it.
// (A strictly lower triangle is the lower triangle of its rows 1.. and columns ..n - 2.)
#pragma once

#include "momentum_delta/types.hpp"

namespace momentum_delta::detail {

// out += L X
template <class Lower, class Rows, class Out>
void add_lower_product(const Lower& L, const Rows& X, Out&& out) {
  for (Index t = 0; t < L.rows(); ++t) out.row(t).noalias() += L.row(t).head(t + 1) * X.topRows(t + 1);
}

// out += L^T X
template <class Lower, class Rows, class Out>
void add_lower_transposed_product(const Lower& L, const Rows& X, Out&& out) {
  const Index n = L.rows();
  for (Index j = 0; j < n; ++j)
    out.row(j).noalias() += L.col(j).tail(n - j).transpose() * X.bottomRows(n - j);
}

// X = (I + N)^{-1} X, reading N_tj with j < t.
template <class Lower, class Rows>
void solve_unit_lower(const Lower& N, Rows&& X) {
  for (Index t = 1; t < N.rows(); ++t) X.row(t).noalias() -= N.row(t).head(t) * X.topRows(t);
}

// X = (I + N)^{-T} X, reading N_tj with j < t.
template <class Lower, class Rows>
void solve_unit_lower_transposed(const Lower& N, Rows&& X) {
  const Index n = N.rows();
  for (Index j = n - 1; j-- > 0;)
    X.row(j).noalias() -= N.col(j).tail(n - 1 - j).transpose() * X.bottomRows(n - 1 - j);
}

}  // namespace momentum_delta::detail
