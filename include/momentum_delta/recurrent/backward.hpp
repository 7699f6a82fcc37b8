// Gradients of the momentum delta rule, token by token: the definition (forward.hpp) differentiated line by
// line, in reverse. gS, gM are the loss's gradients by S_t, M_t.
//
//   o_t = scale q_t S_t                        dq = scale do S_t^T;  gS += scale q^T do
//   S_t = alpha_t S_{t-1} - beta_t M_t         dalpha = <gS, S_{t-1}>;  dbeta = -<gS, M_t>;  gM -= beta gS;
//   gS *= alpha M_t = mu_t M_{t-1} - kt_t^T u_t            dmu = <gM, M_{t-1}>;  dkt = -u gM^T;  du = -kt gM;
//   gM *= mu u_t = v_t - p_t S_{t-1}                    dv = du;  dp = -du S_{t-1}^T;  gS -= p^T du
//
// with kt = eta k, dk = eta dkt, deta = k . dkt, dlog_alpha = alpha dalpha, dlog_mu = mu dmu.
#pragma once

#include "momentum_delta/detail/head_gradients.hpp"
#include "momentum_delta/recurrent/forward.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta::detail {

template <class Scalar>
class RecurrentBackward {
 public:
  explicit RecurrentBackward(const Sizes& s)
      : forward_(s.K, s.V), S_(s.K, s.V), M_(s.K, s.V), do_(s.V), kt_(s.K), du_(s.V), row_(s.K) {}

  // dS, dM: in, gradients by the state after the last token; out, by the state before the first.
  void operator()(const Head<Scalar>& x, const Recorded<Scalar>& saved, const HeadGradients<Scalar>& g,
                  MatrixRef<Scalar> dS, MatrixRef<Scalar> dM) {
    for (Index c = saved.checkpoints(); c-- > 0;) {
      saved.state(c, S_, M_);
      range(x, saved.begin(c), saved.end(c), S_, M_, g, dS, dM);
    }
  }

 private:
  // Tokens [begin, end), whose first sees the state S, M: the later half, from a state carried there, then
  // the earlier half. So no more states are alive than the logarithm of their number, and nothing is divided
  // by a decay.
  void range(const Head<Scalar>& x, Index begin, Index end, const Matrix<Scalar>& S, const Matrix<Scalar>& M,
             const HeadGradients<Scalar>& g, MatrixRef<Scalar> dS, MatrixRef<Scalar> dM) {
    Matrix<Scalar> S_later = S, M_later = M;  // K x V
    if (end - begin == 1) {
      forward_.update(x, begin, S_later, M_later);
      token(x, begin, S, M, S_later, M_later, g, dS, dM);
      return;
    }
    const Index middle = begin + (end - begin) / 2;
    for (Index t = begin; t < middle; ++t) forward_.update(x, t, S_later, M_later);
    range(x, middle, end, S_later, M_later, g, dS, dM);
    S_later.resize(0, 0);
    M_later.resize(0, 0);
    range(x, begin, middle, S, M, g, dS, dM);
  }

  // S0, M0, S1, M1: the state before and after token t. u_t is still in forward_.
  void token(const Head<Scalar>& x, Index t, const Matrix<Scalar>& S0, const Matrix<Scalar>& M0,
             const Matrix<Scalar>& S1, const Matrix<Scalar>& M1, const HeadGradients<Scalar>& g,
             MatrixRef<Scalar> gS, MatrixRef<Scalar> gM) {
    const Scalar alpha = decay(x.log_alpha[t]);
    const Scalar mu = decay(x.log_mu[t]);
    const auto& u = forward_.u();

    // o_t = scale q_t S_t
    g.read_do(t, do_);                      // 1 x V
    row_.noalias() = do_ * S1.transpose();  // 1 x K
    row_ *= x.scale;
    g.dq.put(t, row_);
    gS += x.scale * x.q.row(t).transpose().lazyProduct(do_);  // K x V

    // S_t = alpha_t S_{t-1} - beta_t M_t
    g.dbeta.put(t, -gS.cwiseProduct(M1).sum());
    g.dlog_alpha.put(t, alpha * gS.cwiseProduct(S0).sum());
    gM -= x.beta[t] * gS;  // K x V
    gS *= alpha;           // K x V

    // M_t = mu_t M_{t-1} - kt_t^T u_t
    g.dlog_mu.put(t, mu * gM.cwiseProduct(M0).sum());
    row_.noalias() = u * gM.transpose();  // 1 x K; -dkt
    g.deta.put(t, -row_.cwiseProduct(x.k.row(t)).sum());
    row_ *= -x.eta[t];
    g.dk.put(t, row_);
    kt_ = x.eta[t] * x.k.row(t);  // 1 x K
    du_.noalias() = kt_ * gM;     // 1 x V
    du_ = -du_;
    gM *= mu;  // K x V

    // u_t = v_t - p_t S_{t-1}
    g.dv.put(t, du_);
    row_.noalias() = du_ * S0.transpose();  // 1 x K
    row_ = -row_;
    g.dp.put(t, row_);
    gS -= x.p.row(t).transpose().lazyProduct(du_);  // K x V
  }

  RecurrentForward<Scalar> forward_;
  Matrix<Scalar> S_, M_;
  RowVector<Scalar> do_, kt_, du_, row_;
};

}  // namespace momentum_delta::detail
