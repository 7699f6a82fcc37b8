// The momentum delta rule, token by token: the definition. Per head, with rows q_t, k_t, p_t of length K and
// v_t of length V, scalar gates, and the state S, M of K x V:
//
//   u_t = v_t - p_t S_{t-1}                    p reads the old, undecayed S
//   M_t = mu_t M_{t-1} - (eta_t k_t)^T u_t     momentum of the gradient of |v_t - p_t S|^2 / 2
//   S_t = alpha_t S_{t-1} - beta_t M_t         the new M
//   o_t = scale q_t S_t                        the new S
#pragma once

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/head.hpp"

namespace momentum_delta::detail {

template <class Scalar>
class RecurrentForward {
 public:
  RecurrentForward(Index K, Index V) : kt_(K), u_(V), o_(V) {}

  // Token t: kt_t and u_t are left in kt() and u(), and the state before it becomes the state after it.
  void update(const Head<Scalar>& x, Index t, MatrixRef<Scalar> S, MatrixRef<Scalar> M) {
    const Scalar alpha = decay(x.log_alpha[t]);
    const Scalar mu = decay(x.log_mu[t]);
    kt_ = x.eta[t] * x.k.row(t);                   // 1 x K
    u_ = x.v.row(t);                               // 1 x V
    u_.noalias() -= x.p.row(t) * S;                // 1 x V
    M = mu * M - kt_.transpose().lazyProduct(u_);  // K x V
    S = alpha * S - x.beta[t] * M;                 // K x V
  }

  // S, M: in, the state before the first token; out, after the last. o: T x V, assigned. record: see
  // saved.hpp.
  template <class Record>
  void operator()(const Head<Scalar>& x, MatrixRef<Scalar> S, MatrixRef<Scalar> M, RowsMap<Scalar> o,
                  const Record& record) {
    for (Index t = 0; t < x.T(); ++t) {
      if (record.wants_state(t)) record.state(t, 0, S, M);
      update(x, t, S, M);
      record.u(t, 0, u_);
      o_.noalias() = x.q.row(t) * S;  // 1 x V
      o.row(t) = x.scale * o_;        // 1 x V
    }
  }

  const RowVector<Scalar>& kt() const { return kt_; }
  const RowVector<Scalar>& u() const { return u_; }

 private:
  RowVector<Scalar> kt_, u_, o_;
};

}  // namespace momentum_delta::detail
