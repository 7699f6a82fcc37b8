// Where a backward kernel leaves the gradients of one head of one sequence, and where it reads the upstream
// ones.
#pragma once

#include "momentum_delta/detail/head.hpp"

namespace momentum_delta::detail {

// Gradient rows in the caller's memory; data null: not wanted.
template <class Scalar>
struct RowsSink {
  Scalar* data = nullptr;
  Index stride = 0, cols = 0;
  bool add = false;  // to what is there, or assign

  template <class Rows>
  void put(Index t, const Rows& rows) const {
    if (data == nullptr) return;
    RowsMap<Scalar> out(data + t * stride, rows.rows(), cols, Eigen::OuterStride<>(stride));
    if (add)
      out += rows;
    else
      out = rows;
  }
};

template <class Scalar>
struct GateSink {
  Scalar* data = nullptr;
  Index stride = 0;
  bool add = false;

  void put(Index t, Scalar value) const {
    if (data != nullptr) data[t * stride] = add ? data[t * stride] + value : value;
  }
};

template <class Scalar>
struct HeadGradients {
  // The gradient of o, T x V; null: 0.
  const Scalar* do_ = nullptr;
  Index do_stride = 0;

  RowsSink<Scalar> dq, dk, dv, dp;
  GateSink<Scalar> dlog_alpha, dlog_mu, dbeta, deta;

  // rows = do of the tokens from t on
  template <class Rows>
  void read_do(Index t, Rows&& rows) const {
    if (do_ == nullptr)
      rows.setZero();
    else
      rows = RowsMap<const Scalar>(do_ + t * do_stride, rows.rows(), rows.cols(),
                                   Eigen::OuterStride<>(do_stride));
  }
};

// Value head h of one sequence. Value heads of a group come one after another, and all but the first add
// to the shared gradients.
template <class Scalar>
HeadGradients<Scalar> gradients_of(const Inputs<Scalar>& x, const OutputGradients<Scalar>& dy,
                                   const InputGradients<Scalar>& dx, const SequenceTokens& tokens, Index h) {
  const Index HV = x.v.shape[2];
  const auto rows = [&](const TokenView<Scalar>& view) -> RowsSink<Scalar> {
    if (view.empty()) return {};
    const Index group = HV / view.shape[2];
    const auto& s = view.stride;
    return {view.data + tokens.b * s[0] + tokens.begin * s[1] + h / group * s[2], s[1], view.shape[3],
            dx.accumulate || h % group != 0};
  };
  const auto gate = [&](const GateView<Scalar>& view) -> GateSink<Scalar> {
    const auto& s = view.stride;
    return view.empty() ? GateSink<Scalar>{}
                        : GateSink<Scalar>{view.data + tokens.b * s[0] + tokens.begin * s[1] + h * s[2], s[1],
                                           dx.accumulate};
  };
  HeadGradients<Scalar> g;
  if (!dy.do_.empty()) {
    const auto& s = dy.do_.stride;
    g.do_ = dy.do_.data + tokens.b * s[0] + tokens.begin * s[1] + h * s[2];
    g.do_stride = s[1];
  }
  g.dq = rows(dx.dq);
  g.dk = rows(dx.dk);
  g.dv = rows(dx.dv);
  g.dp = rows(dx.dp);
  if (x.p.absent()) {  // p is k, so its gradient is k's as well
    g.dp = g.dk;
    g.dp.add = true;
  }
  g.dlog_alpha = gate(dx.dlog_alpha);
  g.dlog_mu = gate(dx.dlog_mu);
  g.dbeta = gate(dx.dbeta);
  g.deta = gate(dx.deta);
  return g;
}

}  // namespace momentum_delta::detail
