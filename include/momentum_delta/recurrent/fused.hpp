// The recurrence (forward.hpp) at the speed of the machine: a panel of V columns of S and M stays in the
// innermost cache while the tokens pass, and one sweep over its K rows a token updates M and S and reads both
// q_t S_t and p_{t+1} S_t, so that every element is loaded and stored once.
//
// Decay is applied late. With S = a R and M = m N, for scalars a and m that collect the decays,
//
//   u_t  = v_t - a_{t-1} (p_t R)
//   N   -= k_t^T (u_t eta_t / m_t)                  m_t = mu_t m_{t-1}
//   R   -= (beta_t m_t / a_t) N                     a_t = alpha_t a_{t-1}
//   o_t  = scale a_t (q_t R)
//
// which is four multiply-adds an element where the definition needs six. Where a or m would leave
// [1e-8, 1e8], 0 included, it is multiplied into its matrix in that token's sweep and starts again from 1.
// Scaling by a number loses no precision; the bounds say how much range it takes: N and R are at most 1e8
// times M and S.
#pragma once

#include <algorithm>
#include <vector>

#include "momentum_delta/recurrent/forward.hpp"

namespace momentum_delta::detail {

template <class Scalar>
class FusedForward {
 public:
  explicit FusedForward(Index K) : R_(std::size_t(K)), N_(std::size_t(K)), steps_(std::size_t(block)) {}

  // S, M: in, the state before the first token; out, after the last. o: T x V, assigned. record: see
  // saved.hpp.
  template <class Record>
  void operator()(const Head<Scalar>& x, MatrixRef<Scalar> S, MatrixRef<Scalar> M, RowsMap<Scalar> o,
                  const Record& record) {
    for (Index t0 = 0; t0 < x.T(); t0 += block) {
      const Index n = std::min(block, x.T() - t0);
      plan(x, t0, n);
      for (Index column = 0; column < x.V(); column += W)
        panel(x, t0, n, column, std::min<Index>(W, x.V() - column), S, M, o, record);
    }
  }

 private:
  static constexpr int W = std::max<int>(1, 64 / int(sizeof(Scalar)));  // columns: a cache line of them
  static constexpr Index block = 512;                                   // tokens planned at a time
  using Row = Eigen::Array<Scalar, 1, W>;

  // The scalars of one token, the same for every panel.
  struct Step {
    Scalar a, m;            // before the token
    Scalar fold_a, fold_m;  // what R and N are multiplied by first, if `fold`
    Scalar u;               // eta_t / m_t
    Scalar write;           // beta_t m_t / a_t
    Scalar read;            // scale a_t
    bool fold;
  };

  void plan(const Head<Scalar>& x, Index t0, Index n) {
    const auto outside = [](const Scalar& c) { return !(c >= Scalar(1e-8) && c <= Scalar(1e8)); };
    Scalar a = Scalar(1), m = Scalar(1);
    for (Index i = 0; i < n; ++i) {
      Step& s = steps_[std::size_t(i)];
      s.a = a;
      s.m = m;
      a *= decay(x.log_alpha[t0 + i]);
      m *= decay(x.log_mu[t0 + i]);
      s.fold_a = s.fold_m = Scalar(1);
      if (outside(a)) std::swap(s.fold_a, a);
      if (outside(m)) std::swap(s.fold_m, m);
      s.fold = s.fold_a != Scalar(1) || s.fold_m != Scalar(1);
      s.u = x.eta[t0 + i] / m;
      s.write = x.beta[t0 + i] * m / a;
      s.read = x.scale * a;
    }
    a_ = a;
    m_ = m;
  }

  // Tokens [t0, t0 + n), columns [column, column + width); the panel's other columns are 0.
  template <class Record>
  void panel(const Head<Scalar>& x, Index t0, Index n, Index column, Index width, MatrixRef<Scalar>& S,
             MatrixRef<Scalar>& M, RowsMap<Scalar>& o, const Record& record) {
    const Index K = x.K();
    for (Index i = 0; i < K; ++i) {
      R_[std::size_t(i)].setZero();
      N_[std::size_t(i)].setZero();
      R_[std::size_t(i)].head(width) = S.row(i).segment(column, width).array();
      N_[std::size_t(i)].head(width) = M.row(i).segment(column, width).array();
    }
    Row pR = Row::Zero(), qR;
    const Scalar* p = x.p.row(t0).data();
    for (Index i = 0; i < K; ++i) pR += p[i] * R_[std::size_t(i)];

    for (Index i = 0; i < n; ++i) {
      const Index t = t0 + i;
      const Step& s = steps_[std::size_t(i)];
      if (record.wants_state(t)) {
        store(s.a, s.m, column, width, S, M);
        record.state(t, column, S.middleCols(column, width), M.middleCols(column, width));
      }
      Row u = Row::Zero();
      u.head(width) = x.v.row(t).segment(column, width).array();
      u -= s.a * pR;
      record.u(t, column, u.head(width).matrix());
      u *= s.u;
      const Scalar* p_next = x.p.row(i + 1 < n ? t + 1 : t).data();
      if (s.fold)
        sweep<true>(K, s, x.k.row(t).data(), x.q.row(t).data(), p_next, u, qR, pR);
      else
        sweep<false>(K, s, x.k.row(t).data(), x.q.row(t).data(), p_next, u, qR, pR);
      qR *= s.read;
      o.row(t).segment(column, width) = qR.head(width).matrix();
    }
    store(a_, m_, column, width, S, M);
  }

  // One token: N and R updated, qR = q R, pR = p R.
  template <bool Fold>
  void sweep(Index K, const Step& s, const Scalar* k, const Scalar* q, const Scalar* p, const Row& u, Row& qR,
             Row& pR) {
    Row* const R = R_.data();
    Row* const N = N_.data();
    const Row u_t = u;
    const Scalar write = s.write;
    Row from_q = Row::Zero(), from_p = Row::Zero();
    for (Index i = 0; i < K; ++i) {
      Row N_i = N[i], R_i = R[i];
      if constexpr (Fold) {
        N_i *= s.fold_m;
        R_i *= s.fold_a;
      }
      N_i -= k[i] * u_t;
      R_i -= write * N_i;
      N[i] = N_i;
      R[i] = R_i;
      from_q += q[i] * R_i;
      from_p += p[i] * R_i;
    }
    qR = from_q;
    pR = from_p;
  }

  // The panel's columns of S and M, which it leaves as they are in R and N.
  void store(Scalar a, Scalar m, Index column, Index width, MatrixRef<Scalar>& S,
             MatrixRef<Scalar>& M) const {
    for (Index i = 0; i < S.rows(); ++i) {
      S.row(i).segment(column, width) = (a * R_[std::size_t(i)]).head(width).matrix();
      M.row(i).segment(column, width) = (m * N_[std::size_t(i)]).head(width).matrix();
    }
  }

  std::vector<Row> R_, N_;  // K rows
  std::vector<Step> steps_;
  Scalar a_, m_;  // after the block's last token
};

}  // namespace momentum_delta::detail
