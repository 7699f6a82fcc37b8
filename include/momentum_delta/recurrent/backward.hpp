/// \file
/// Gradients of the momentum delta rule, token by token: the definition (forward.hpp) differentiated line by
/// line, in reverse. gS, gM are the loss's gradients by S_t, M_t.
///
///     o_t = scale q_t S_t               dq = scale do S_t^T, gS += scale q^T do
///     S_t = alpha_t S_{t-1} - beta_t M_t
///                                       dbeta = -<gS, M_t>, dalpha = <gS, S_{t-1}>,
///                                       gM -= beta gS, gS *= alpha
///     M_t = mu_t M_{t-1} - kt_t^T u_t   dmu = <gM, M_{t-1}>, dkt = -u gM^T, du = -kt gM, gM *= mu
///     u_t = v_t - p_t S_{t-1}           dv = du, dp = -du S_{t-1}^T, gS -= p^T du
///
/// with kt = eta k, dk = eta dkt, deta = k . dkt, dlog_alpha = alpha dalpha, dlog_mu = mu dmu.
#pragma once

#include <bit>

#include "momentum_delta/detail/head_gradients.hpp"
#include "momentum_delta/recurrent/forward.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar, class Storage>
class RecurrentBackward {
 public:
  // For the value heads of a group and `stretch` tokens between two checkpoints.
  RecurrentBackward(Arena& arena, const Sizes& s, Index stretch)
      : K_(s.K),
        V_(s.V),
        forward_(arena, s, s.V),
        gradients_(arena.take<Scalar>(s.HV / std::max<Index>(s.HK, 1) * 2 * s.K * s.V)),
        states_(arena.take<Scalar>(Index(std::bit_width(std::uint64_t(stretch)) + 2) * 2 * s.K * s.V)),
        do_(arena.take<Scalar>(s.V), s.V),
        du_(arena.take<Scalar>(s.V), s.V),
        q_(arena.take<Scalar>(s.K), s.K),
        row_(arena.take<Scalar>(s.K), s.K) {}

  // Head `member` of the group, from the gradients by the state after its last token ..
  void begin(Index member, const StatePair<const Scalar>& dlast) {
    State g = gradient(member);
    dlast.S.read(0, g.S);
    dlast.M.read(0, g.M);
  }
  // .. over the tokens from checkpoint c to the next, for each c in reverse ..
  void operator()(Index member, const Head<Scalar, Storage>& x, const Recorded<Scalar>& saved, Index c,
                  const HeadGradients<Scalar, Storage>& g) {
    State first = state(0), gradient = this->gradient(member);
    saved.state(c, [&](Index column, Index width, const Scalar* S, const Scalar* M) {
      first.S.middleCols(column, width) = Eigen::Map<const Matrix<Scalar>>(S, K_, width);
      first.M.middleCols(column, width) = Eigen::Map<const Matrix<Scalar>>(M, K_, width);
    });
    range(x, saved.begin(c), saved.end(c), 0, g, gradient);
  }
  // .. to those by the state before its first.
  void end(Index member, const StatePair<Scalar>& dfirst, bool add) {
    const State g = gradient(member);
    dfirst.S.write(0, g.S, add);
    dfirst.M.write(0, g.M, add);
  }

 private:
  struct State {
    Eigen::Map<Matrix<Scalar>> S, M;  // K x V
  };
  State pair(Scalar* states, Index i) const {
    return {{states + 2 * i * K_ * V_, K_, V_}, {states + (2 * i + 1) * K_ * V_, K_, V_}};
  }
  State state(Index depth) const { return pair(states_, depth); }
  State gradient(Index member) const { return pair(gradients_, member); }

  // Tokens [begin, end), whose first sees state(depth): the later half, from a state carried there, then the
  // earlier half. So no more states are alive than the logarithm of their number, and nothing is divided by a
  // decay.
  void range(const Head<Scalar, Storage>& x, Index begin, Index end, Index depth,
             const HeadGradients<Scalar, Storage>& g, State& gradient) {
    const State before = state(depth);
    State later = state(depth + 1);
    later.S = before.S;
    later.M = before.M;
    if (end - begin == 1) {
      forward_.update(x, begin, 0, later.S, later.M);
      token(x, begin, before, later, g, gradient.S, gradient.M);
      return;
    }
    const Index middle = begin + (end - begin) / 2;
    for (Index t = begin; t < middle; ++t) forward_.update(x, t, 0, later.S, later.M);
    range(x, middle, end, depth + 1, g, gradient);
    range(x, begin, middle, depth, g, gradient);
  }

  // The states before and after token t, whose k_t, p_t, kt_t and u_t are still in forward_.
  void token(const Head<Scalar, Storage>& x, Index t, const State& before, const State& after,
             const HeadGradients<Scalar, Storage>& g, MatrixRef<Scalar> gS, MatrixRef<Scalar> gM) {
    const Scalar alpha = decay(x.log_alpha[t]);
    const Scalar mu = decay(x.log_mu[t]);
    const auto u = forward_.u(V_);
    const auto put = [&](const auto& sink, const auto& row) {
      sink.put(t, 1, 0, row.size(), row.data(), row.size());
    };

    // o_t = scale q_t S_t
    if (g.do_)
      do_ = Eigen::Map<const RowVector<Storage>>(g.do_ + t * g.do_stride, V_).template cast<Scalar>();
    else
      do_.setZero();                             // 1 x V
    row_.noalias() = do_ * after.S.transpose();  // 1 x K
    row_ *= x.scale;
    put(g.dq, row_);
    q_ = x.scale * x.q.row(t).template cast<Scalar>();  // 1 x K
    gS += q_.transpose().lazyProduct(do_);              // K x V

    // S_t = alpha_t S_{t-1} - beta_t M_t
    g.dbeta.put(t, -gS.cwiseProduct(after.M).sum());
    g.dlog_alpha.put(t, alpha * gS.cwiseProduct(before.S).sum());
    gM -= x.beta[t] * gS;  // K x V
    gS *= alpha;           // K x V

    // M_t = mu_t M_{t-1} - kt_t^T u_t
    g.dlog_mu.put(t, mu * gM.cwiseProduct(before.M).sum());
    row_.noalias() = u * gM.transpose();  // 1 x K; -dkt
    g.deta.put(t, -row_.cwiseProduct(forward_.k()).sum());
    row_ *= -x.eta[t];
    put(g.dk, row_);
    du_.noalias() = forward_.kt() * gM;  // 1 x V
    du_ = -du_;
    gM *= mu;  // K x V

    // u_t = v_t - p_t S_{t-1}
    put(g.dv, du_);
    row_.noalias() = du_ * before.S.transpose();  // 1 x K
    row_ = -row_;
    put(g.dp, row_);
    gS -= forward_.p().transpose().lazyProduct(du_);  // K x V
  }

  Index K_, V_;
  RecurrentForward<Scalar, Storage> forward_;
  Scalar* gradients_;  // a State for each head of the group: dS, dM
  Scalar* states_;     // a State for each depth of range()
  Eigen::Map<RowVector<Scalar>> do_, du_, q_, row_;
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
