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

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {

template <class Scalar, class Storage>
class FusedForward {
 public:
  // Room for `columns` columns of a head's V.
  FusedForward(Arena& arena, const Sizes& s, Index columns)
      : K_(s.K),
        R_(arena.take<Scalar>(s.K * round_up(columns, W))),
        N_(arena.take<Scalar>(s.K * round_up(columns, W))),
        pR_(arena.take<Scalar>(round_up(columns, W))),
        alpha_(arena.take<Scalar>(block)),
        mu_(arena.take<Scalar>(block)),
        steps_(arena.take<Step>(block)) {
    if constexpr (converts) q_ = arena.take<Scalar>(block * s.K);
    if constexpr (converts) k_ = arena.take<Scalar>(block * s.K);
    if constexpr (converts) p_ = arena.take<Scalar>((block + 1) * s.K);
  }

  // Columns [begin, end) of V, from the state `first` (absent: 0) to the state `last` (absent: not wanted).
  // o: T x V, assigned. record: see saved.hpp.
  template <class Record>
  void operator()(const Head<Scalar, Storage>& x, Index begin, Index end,
                  const StatePair<const Scalar>& first, RowsMap<Storage> o, const StatePair<Scalar>& last,
                  const Record& record) {
    first.S.read(begin, end, K_, R_, K_ * W, K_ * W);
    first.M.read(begin, end, K_, N_, K_ * W, K_ * W);
    Scalar a = Scalar(1), m = Scalar(1);
    for (Index t0 = 0; t0 < x.T(); t0 += block) {
      const Index n = std::min(block, x.T() - t0);
      const Index next = std::min(n + 1, x.T() - t0);  // a token also reads p of the next one
      const Tokens tokens{rows(x.q, t0, n, q_), rows(x.k, t0, n, k_), rows(x.p, t0, next, p_), next};
      plan(x, t0, n, a, m);
      for (Index column = begin; column < end; column += W)
        panel(x, tokens, t0, n, column, std::min<Index>(W, end - column), column - begin, o, record);
    }
    last.S.write(begin, end, K_, R_, K_ * W, a);
    last.M.write(begin, end, K_, N_, K_ * W, m);
  }

 private:
  static constexpr int W = panel_width<Scalar>;
  static constexpr Index block = 128;  // tokens planned, and converted, at a time
  static constexpr bool converts = !std::is_same_v<Scalar, Storage>;

  // The scalars of one token, the same for every panel.
  struct Step {
    Scalar a, m;            // before the token
    Scalar fold_a, fold_m;  // what R and N are multiplied by first, if `fold`
    Scalar u;               // eta_t / m_t
    Scalar write;           // beta_t m_t / a_t
    Scalar read;            // scale a_t
    bool fold;
  };

  struct ScalarRows {
    const Scalar* data;
    Index stride;
    const Scalar* operator[](Index i) const { return data + i * stride; }
  };
  struct Tokens {
    ScalarRows q, k, p;
    Index next;  // rows of p
  };

  // Rows [t0, t0 + n) as Scalars: where they are, or converted into `buffer`.
  ScalarRows rows(const RowsMap<const Storage>& from, Index t0, Index n, Scalar* buffer) const {
    if constexpr (converts) {
      for (Index i = 0; i < n; ++i) convert(from.row(t0 + i).data(), buffer + i * K_, K_);
      return {buffer, K_};
    } else {
      return {from.row(t0).data(), from.outerStride()};
    }
  }

  // a, m: in, before the block; out, after it.
  void plan(const Head<Scalar, Storage>& x, Index t0, Index n, Scalar& a, Scalar& m) {
    for (Index i = 0; i < n; ++i) {
      alpha_[i] = x.log_alpha[t0 + i];
      mu_[i] = x.log_mu[t0 + i];
    }
    decay_row(alpha_, alpha_, n);
    decay_row(mu_, mu_, n);
    const auto outside = [](const Scalar& c) { return !(c >= Scalar(1e-8) && c <= Scalar(1e8)); };
    for (Index i = 0; i < n; ++i) {
      Step& s = steps_[i];
      s.a = a;
      s.m = m;
      a *= alpha_[i];
      m *= mu_[i];
      s.fold_a = s.fold_m = Scalar(1);
      if (outside(a)) std::swap(s.fold_a, a);
      if (outside(m)) std::swap(s.fold_m, m);
      s.fold = s.fold_a != Scalar(1) || s.fold_m != Scalar(1);
      s.u = x.eta[t0 + i] / m;
      s.write = x.beta[t0 + i] * m / a;
      s.read = x.scale * a;
    }
  }

  // Tokens [t0, t0 + n), columns [column, column + width), which are those from `own` on here.
  template <class Record>
  void panel(const Head<Scalar, Storage>& x, const Tokens& tokens, Index t0, Index n, Index column,
             Index width, Index own, RowsMap<Storage>& o, const Record& record) {
    Scalar* const R = R_ + own * K_;
    Scalar* const N = N_ + own * K_;
    Row<Scalar> pR = Row<Scalar>::Zero(), qR;
    if (t0 > 0)
      pR = aligned_row(pR_ + own);
    else
      for (Index i = 0; i < K_; ++i) pR += tokens.p[0][i] * aligned_row(R + i * W);

    for (Index i = 0; i < n; ++i) {
      const Index t = t0 + i;
      const Step& s = steps_[i];
      if (record.wants_state(t))
        record.state(
            t, column, width, [&](Index row) -> Row<Scalar> { return s.a * aligned_row(R + row * W); },
            [&](Index row) -> Row<Scalar> { return s.m * aligned_row(N + row * W); });
      Row<Scalar> u = load_row<Scalar>(x.v.row(t).data() + column, width);
      u -= s.a * pR;
      record.u(t, column, u.head(width));
      u *= s.u;
      const Scalar* const p_next = tokens.p[std::min(i + 1, tokens.next - 1)];
      if (s.fold)
        sweep<true>(K_, s, R, N, tokens.k[i], tokens.q[i], p_next, u, qR, pR);
      else
        sweep<false>(K_, s, R, N, tokens.k[i], tokens.q[i], p_next, u, qR, pR);
      qR *= s.read;
      store_row(qR, o.data() + t * o.outerStride() + column, width);
    }
    aligned_row(pR_ + own) = pR;
  }

  // One token: N and R updated, qR = q R, pR = p R. A function of its own, whose loop gets all registers.
  template <bool Fold>
  EIGEN_DONT_INLINE static void sweep(Index K, const Step& s, Scalar* R, Scalar* N, const Scalar* k,
                                      const Scalar* q, const Scalar* p, const Row<Scalar>& u, Row<Scalar>& qR,
                                      Row<Scalar>& pR) {
    const Row<Scalar> u_t = u;
    const Scalar write = s.write;
    Row<Scalar> from_q = Row<Scalar>::Zero(), from_p = Row<Scalar>::Zero();
    for (Index i = 0; i < K; ++i) {
      Row<Scalar> N_i = aligned_row(N + i * W), R_i = aligned_row(R + i * W);
      if constexpr (Fold) {
        N_i *= s.fold_m;
        R_i *= s.fold_a;
      }
      N_i -= k[i] * u_t;
      R_i -= write * N_i;
      aligned_row(N + i * W) = N_i;
      aligned_row(R + i * W) = R_i;
      from_q += q[i] * R_i;
      from_p += p[i] * R_i;
    }
    qR = from_q;
    pR = from_p;
  }

  Index K_;
  Scalar *R_, *N_;       // a K x W panel for each W columns
  Scalar* pR_;           // p R of the next token, for each column
  Scalar *alpha_, *mu_;  // of the block's tokens
  Step* steps_;
  Scalar *q_ = nullptr, *k_ = nullptr, *p_ = nullptr;  // block x K, if Storage is another type
};

}  // namespace momentum_delta::detail
