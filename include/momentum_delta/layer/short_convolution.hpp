/// \file
/// The causal depthwise convolution before q, k and v, and its gradient. Every channel sees its own last W
/// tokens:
///
///     y_t = sum_{j = 1 .. W} w_j x_{t-W+j}
///
/// x before the first token is `tail`, W - 1 rows. (fla, ShortConvolution; the weight of torch.nn.Conv1d,
/// [D, 1, W], has w_W, of the token itself, last.)
#pragma once

#include <algorithm>

#include "momentum_delta/types.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// x and y: T x D. w: W x D.
template <class Scalar>
void short_convolution(const RowsMap<const Scalar>& x, const RowsMap<const Scalar>& tail,
                       const Matrix<Scalar>& w, RowsMap<Scalar> y) {
  const Index W = w.rows();
  for (Index t = 0; t < x.rows(); ++t) {
    y.row(t) = w.row(W - 1).cwiseProduct(x.row(t));
    for (Index j = 0; j < W - 1; ++j) {
      const Index from = t - (W - 1) + j;
      if (from >= 0)
        y.row(t) += w.row(j).cwiseProduct(x.row(from));
      else
        y.row(t) += w.row(j).cwiseProduct(tail.row(t + j));
    }
  }
}

// From dy: dx is assigned, dw is added to; the tail is a constant.
template <class Scalar>
void short_convolution_backward(const RowsMap<const Scalar>& x, const RowsMap<const Scalar>& tail,
                                const Matrix<Scalar>& w, const RowsMap<const Scalar>& dy, RowsMap<Scalar> dx,
                                Matrix<Scalar>& dw) {
  const Index W = w.rows(), T = x.rows();
  for (Index t = 0; t < T; ++t) {
    dx.row(t) = w.row(W - 1).cwiseProduct(dy.row(t));
    dw.row(W - 1) += dy.row(t).cwiseProduct(x.row(t));
    for (Index j = 0; j < W - 1; ++j) {
      const Index from = t - (W - 1) + j, to = t + (W - 1) - j;
      if (to < T) dx.row(t) += w.row(j).cwiseProduct(dy.row(to));
      if (from >= 0)
        dw.row(j) += dy.row(t).cwiseProduct(x.row(from));
      else
        dw.row(j) += dy.row(t).cwiseProduct(tail.row(t + j));
    }
  }
}

// The tail after these tokens: the last W - 1 rows of tail, then x. In place.
template <class Scalar>
void move_tail(const RowsMap<const Scalar>& x, RowsMap<Scalar> tail) {
  const Index kept = std::max<Index>(0, tail.rows() - x.rows()), moved = tail.rows() - kept;
  for (Index i = 0; i < kept; ++i) tail.row(i) = tail.row(i + moved);
  tail.bottomRows(moved) = x.bottomRows(moved);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
