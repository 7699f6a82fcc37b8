// Gradients of the momentum delta rule, token by token: the definition (forward.hpp) differentiated line by
// line, in reverse. gS, gM are the loss's gradients by S_t, M_t.
//
//   o_t = scale q_t S_t               dq = scale do S_t^T, gS += scale q^T do
//   S_t = alpha_t S_{t-1} - beta_t M_t
//                                     dbeta = -<gS, M_t>, dalpha = <gS, S_{t-1}>, gM -= beta gS, gS *= alpha
//   M_t = mu_t M_{t-1} - kt_t^T u_t   dmu = <gM, M_{t-1}>, dkt = -u gM^T, du = -kt gM, gM *= mu
//   u_t = v_t - p_t S_{t-1}           dv = du, dp = -du S_{t-1}^T, gS -= p^T du
//
// with kt = eta k, dk = eta dkt, deta = k . dkt, dlog_alpha = alpha dalpha, dlog_mu = mu dmu.
#pragma once

#include <deque>

#include "momentum_delta/detail/head_gradients.hpp"
#include "momentum_delta/recurrent/forward.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta::detail {

template <class Scalar>
class RecurrentBackward {
 public:
  explicit RecurrentBackward(const Sizes& s) : sizes_(s), forward_(s.K, s.V), do_(s.V), du_(s.V), row_(s.K) {}

  // dS, dM: in, gradients by the state after the last token; out, by the state before the first.
  void operator()(const Head<Scalar>& x, const Recorded<Scalar>& saved, const HeadGradients<Scalar>& g,
                  MatrixRef<Scalar> dS, MatrixRef<Scalar> dM) {
    for (Index c = saved.checkpoints(); c-- > 0;) {
      saved.state(c, state(0).S, state(0).M);
      range(x, saved.begin(c), saved.end(c), 0, g, dS, dM);
    }
  }

 private:
  struct State {
    Matrix<Scalar> S, M;  // K x V
  };

  State& state(std::size_t depth) {
    while (states_.size() <= depth)
      states_.push_back({Matrix<Scalar>(sizes_.K, sizes_.V), Matrix<Scalar>(sizes_.K, sizes_.V)});
    return states_[depth];
  }

  // Tokens [begin, end), whose first sees state(depth): the later half, from a state carried there, then the
  // earlier half. So no more states are alive than the logarithm of their number, and nothing is divided by a
  // decay.
  void range(const Head<Scalar>& x, Index begin, Index end, std::size_t depth, const HeadGradients<Scalar>& g,
             MatrixRef<Scalar> dS, MatrixRef<Scalar> dM) {
    State& later = state(depth + 1);
    later = state(depth);
    if (end - begin == 1) {
      forward_.update(x, begin, later.S, later.M);
      token(x, begin, state(depth), later, g, dS, dM);
      return;
    }
    const Index middle = begin + (end - begin) / 2;
    for (Index t = begin; t < middle; ++t) forward_.update(x, t, later.S, later.M);
    range(x, middle, end, depth + 1, g, dS, dM);
    range(x, begin, middle, depth, g, dS, dM);
  }

  // The states before and after token t, whose kt_t and u_t are still in forward_.
  void token(const Head<Scalar>& x, Index t, const State& before, const State& after,
             const HeadGradients<Scalar>& g, MatrixRef<Scalar> gS, MatrixRef<Scalar> gM) {
    const Scalar alpha = decay(x.log_alpha[t]);
    const Scalar mu = decay(x.log_mu[t]);
    const auto& u = forward_.u();

    // o_t = scale q_t S_t
    g.read_do(t, do_);                           // 1 x V
    row_.noalias() = do_ * after.S.transpose();  // 1 x K
    row_ *= x.scale;
    g.dq.put(t, row_);
    gS += x.scale * x.q.row(t).transpose().lazyProduct(do_);  // K x V

    // S_t = alpha_t S_{t-1} - beta_t M_t
    g.dbeta.put(t, -gS.cwiseProduct(after.M).sum());
    g.dlog_alpha.put(t, alpha * gS.cwiseProduct(before.S).sum());
    gM -= x.beta[t] * gS;  // K x V
    gS *= alpha;           // K x V

    // M_t = mu_t M_{t-1} - kt_t^T u_t
    g.dlog_mu.put(t, mu * gM.cwiseProduct(before.M).sum());
    row_.noalias() = u * gM.transpose();  // 1 x K; -dkt
    g.deta.put(t, -row_.cwiseProduct(x.k.row(t)).sum());
    row_ *= -x.eta[t];
    g.dk.put(t, row_);
    du_.noalias() = forward_.kt() * gM;  // 1 x V
    du_ = -du_;
    gM *= mu;  // K x V

    // u_t = v_t - p_t S_{t-1}
    g.dv.put(t, du_);
    row_.noalias() = du_ * before.S.transpose();  // 1 x K
    row_ = -row_;
    g.dp.put(t, row_);
    gS -= x.p.row(t).transpose().lazyProduct(du_);  // K x V
  }

  Sizes sizes_;
  RecurrentForward<Scalar> forward_;
  std::deque<State> states_;  // one for each depth of range(); a deque, so that references to them stay
  RowVector<Scalar> do_, du_, row_;
};

}  // namespace momentum_delta::detail
