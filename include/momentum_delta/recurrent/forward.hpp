/// \file
/// The momentum delta rule, token by token: the definition. Per head, with rows q_t, k_t, p_t of length K and
/// v_t of length V, scalar gates, and the state S, M of K x V:
///
///     u_t = v_t - p_t S_{t-1}                    p reads the old, undecayed S
///     M_t = mu_t M_{t-1} - (eta_t k_t)^T u_t     momentum of the gradient of |v_t - p_t S|^2 / 2
///     S_t = alpha_t S_{t-1} - beta_t M_t         the new M
///     o_t = scale q_t S_t                        the new S
#pragma once

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/saved.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar, class Storage = Scalar>
class RecurrentForward {
 public:
  // Room for `columns` columns of a head's V.
  RecurrentForward(Arena& arena, const Sizes& s, Index columns)
      : K_(s.K),
        S_(arena.take<Scalar>(s.K * columns)),
        M_(arena.take<Scalar>(s.K * columns)),
        q_(arena.take<Scalar>(s.K), s.K),
        k_(arena.take<Scalar>(s.K), s.K),
        p_(arena.take<Scalar>(s.K), s.K),
        kt_(arena.take<Scalar>(s.K), s.K),
        u_(arena.take<Scalar>(columns)),
        o_(arena.take<Scalar>(columns)) {}

  // Token t, columns from `begin` on: k_t, p_t, kt_t and u_t are left in k(), p(), kt() and u(), and the
  // state before the token becomes the state after it.
  void update(const Head<Scalar, Storage>& x, Index t, Index begin, MatrixRef<Scalar> S,
              MatrixRef<Scalar> M) {
    const Scalar alpha = decay(x.log_alpha[t]);
    const Scalar mu = decay(x.log_mu[t]);
    RowMap u = this->u(S.cols());
    k_ = x.k.row(t).template cast<Scalar>();                          // 1 x K
    kt_ = x.eta[t] * k_;                                              // 1 x K
    p_ = x.p.row(t).template cast<Scalar>();                          // 1 x K
    u = x.v.row(t).segment(begin, S.cols()).template cast<Scalar>();  // 1 x V
    u.noalias() -= p_ * S;                                            // 1 x V
    M = mu * M - kt_.transpose().lazyProduct(u);                      // K x V
    S = alpha * S - x.beta[t] * M;                                    // K x V
  }

  // Columns [begin, end) of V, from the state `first` (absent: 0) to the state `last` (absent: not wanted).
  // o: T x V, assigned. record: see saved.hpp.
  void operator()(const Head<Scalar, Storage>& x, Index begin, Index end,
                  const StatePair<const Scalar>& first, RowsMap<Storage> o, const StatePair<Scalar>& last,
                  const Record<Scalar>& record) {
    const Index V = end - begin;
    StateMap S(S_, K_, V), M(M_, K_, V);
    RowMap o_t(o_, V);
    first.S.read(begin, S);
    first.M.read(begin, M);
    for (Index t = 0; t < x.T(); ++t) {
      for (Index column = 0; record.wants_state(t) && column < V; column += panel_width<Scalar>) {
        const Index width = std::min<Index>(panel_width<Scalar>, V - column);
        record.state(
            t, begin + column, width, [&](Index i) { return load_row<Scalar>(&S(i, column), width); },
            [&](Index i) { return load_row<Scalar>(&M(i, column), width); });
      }
      update(x, t, begin, S, M);
      record.u(t, begin, u(V).array());
      q_ = x.q.row(t).template cast<Scalar>();                    // 1 x K
      o_t.noalias() = q_ * S;                                     // 1 x V
      o_t *= x.scale;                                             // 1 x V
      o.row(t).segment(begin, V) = o_t.template cast<Storage>();  // 1 x V
    }
    last.S.write(begin, S);
    last.M.write(begin, M);
  }

  const Eigen::Map<RowVector<Scalar>>& k() const { return k_; }
  const Eigen::Map<RowVector<Scalar>>& p() const { return p_; }
  const Eigen::Map<RowVector<Scalar>>& kt() const { return kt_; }
  Eigen::Map<RowVector<Scalar>> u(Index columns) const { return {u_, columns}; }

 private:
  using RowMap = Eigen::Map<RowVector<Scalar>>;
  using StateMap = Eigen::Map<Matrix<Scalar>>;

  Index K_;
  Scalar *S_, *M_;         // K x columns
  RowMap q_, k_, p_, kt_;  // 1 x K
  Scalar *u_, *o_;         // 1 x columns
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
