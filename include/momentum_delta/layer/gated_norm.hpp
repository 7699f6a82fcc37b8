/// \file
/// The RMS norm after the rule, gated, and its gradient. For each head's o of V elements, its gate g, and the
/// weight w shared by all heads:
///
///     r = 1 / sqrt(mean(o^2) + eps)        y = r o w act(g)        act(g) = sigmoid(g) or g sigmoid(g)
///
/// (fla, FusedRMSNormGated.)
#pragma once

#include "momentum_delta/detail/activation_rows.hpp"
#include "momentum_delta/layer/weights.hpp"
#include "momentum_delta/normalize.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// 1 / sqrt(mean(o^2) + eps), without overflow of the squares: o is scaled by `scale` first.
template <class Scalar, class Row>
InverseNorm<Scalar> inverse_rms(const Row& o, double eps) {
  const Scalar V = Scalar(o.size());
  InverseNorm<Scalar> r(o, V * Scalar(eps));
  r.factor *= std::sqrt(V);
  return r;
}

// o, g and y: rows x V of one head.
template <class Scalar>
void gated_norm(const RowsMap<Scalar>& o, const RowsMap<Scalar>& g, std::span<const Scalar> weight,
                OutputGate gate, double eps, RowsMap<Scalar> y) {
  const Eigen::Map<const RowVector<Scalar>> w(weight.data(), o.cols());
  RowVector<Scalar> act(o.cols());
  for (Index t = 0; t < o.rows(); ++t) {
    const InverseNorm<Scalar> r = inverse_rms<Scalar>(o.row(t), eps);
    act = sigmoid_of(g.row(t).array()).matrix();
    if (gate == OutputGate::swish) act.array() *= g.row(t).array();
    y.row(t) = ((r.scale * o.row(t)) * r.factor).cwiseProduct(w).cwiseProduct(act);
  }
}

// From dy: d_o and dg are assigned, dw is added to. With n = r o, the rows of a norm:
//   dn = dy w act(g)     d_o = r (dn - n mean(n dn))     dw = sum dy n act(g)     dg = dy n w act'(g)
template <class Scalar>
void gated_norm_backward(const RowsMap<Scalar>& o, const RowsMap<Scalar>& g, std::span<const Scalar> weight,
                         OutputGate gate, double eps, const RowsMap<Scalar>& dy, RowsMap<Scalar> d_o,
                         RowsMap<Scalar> dg, Eigen::Ref<RowVector<Scalar>> dw) {
  const Eigen::Map<const RowVector<Scalar>> w(weight.data(), o.cols());
  RowVector<Scalar> n(o.cols()), dn(o.cols()), act(o.cols()), slope(o.cols());
  for (Index t = 0; t < o.rows(); ++t) {
    const InverseNorm<Scalar> r = inverse_rms<Scalar>(o.row(t), eps);
    const auto gt = g.row(t).array();
    act = sigmoid_of(gt).matrix();
    slope = act.array() * (1 - act.array());
    if (gate == OutputGate::swish) {
      slope = act.array() + gt * slope.array();
      act.array() *= gt;
    }
    n = (r.scale * o.row(t)) * r.factor;
    dw += dy.row(t).cwiseProduct(n).cwiseProduct(act);
    dg.row(t) = dy.row(t).cwiseProduct(n).cwiseProduct(w).cwiseProduct(slope);
    dn = dy.row(t).cwiseProduct(w).cwiseProduct(act);
    const Scalar along = n.cwiseProduct(dn).sum() / Scalar(o.cols());
    d_o.row(t) = (r.scale * r.factor) * (dn - along * n);
  }
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
