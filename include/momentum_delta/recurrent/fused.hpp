/// \file
/// The recurrence (forward.hpp) at the speed of the machine: a panel of V columns of S and M stays in the
/// innermost cache while the tokens pass, and one sweep over its K rows a token updates M and S and reads
/// both q_t S_t and p_{t+1} S_t, so that every element is loaded and stored once.
///
/// Decay is applied late. With S = a R and M = m N, for scalars a and m that collect the decays,
///
///     u_t  = v_t - a_{t-1} (p_t R)
///     N   -= k_t^T (u_t eta_t / m_t)                  m_t = mu_t m_{t-1}
///     R   -= (beta_t m_t / a_t) N                     a_t = alpha_t a_{t-1}
///     o_t  = scale a_t (q_t R)
///
/// which is four multiply-adds an element where the definition needs six. Where a or m would leave
/// [1e-8, 1e8], 0 included, it is multiplied into its matrix in that token's sweep and starts again from 1.
/// Scaling by a number loses no precision; the bounds say how much range it takes: N and R are at most 1e8
/// times M and S.
#pragma once

#include <algorithm>

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/fetch.hpp"
#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/saved.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar, class Storage>
class FusedForward {
 public:
  // Room for `columns` columns of a head's V.
  FusedForward(Arena& arena, const Sizes& s, Index columns)
      : K_(s.K),
        Kp_(round_up(s.K, W)),
        columns_(round_up(columns, W)),
        R_(arena.take<Scalar>(K_ * columns_)),
        N_(arena.take<Scalar>(K_ * columns_)),
        pR_(arena.take<Scalar>(columns_)),
        alpha_(arena.take<Scalar>(block)),
        mu_(arena.take<Scalar>(block)),
        steps_(arena.take<Step>(block)),
        q_(arena.take<Scalar>(block * Kp_)),
        k_(arena.take<Scalar>(block * Kp_)),
        p_(arena.take<Scalar>((block + 1) * Kp_)),
        v_(arena.take<Scalar>(block * columns_)),
        o_(arena.take<Scalar>(block * columns_)) {}

  // Columns [begin, end) of V, from the state `first` (absent: 0) to the state `last` (absent: not wanted).
  // o: T x V, assigned. record: see saved.hpp.
  void operator()(const Head<Scalar, Storage>& x, Index begin, Index end,
                  const StatePair<const Scalar>& first, RowsMap<Storage> o, const StatePair<Scalar>& last,
                  const Record<Scalar>& record) {
    const Index width = end - begin;
    first.S.read(begin, end, K_, R_, K_ * W, K_ * W);
    first.M.read(begin, end, K_, N_, K_ * W, K_ * W);
    Scalar a = Scalar(1), m = Scalar(1);
    for (Index t0 = 0; t0 < x.T(); t0 += block) {
      const Index n = std::min(block, x.T() - t0);
      const Index n_p = std::min(n + 1, x.T() - t0);  // a token also reads p of the next one
      copy_rows(x.q, t0, n, 0, K_, q_, Kp_);
      copy_rows(x.k, t0, n, 0, K_, k_, Kp_);
      copy_rows(x.p, t0, n_p, 0, K_, p_, Kp_);
      copy_rows(x.v, t0, n, begin, width, v_, columns_);
      plan(x, t0, n, a, m);
      Fetch<Storage> next;
      for (const auto* rows : {&x.q, &x.k, &x.p}) next.add(*rows, t0 + n, block, 0, K_);
      next.add(x.v, t0 + n, block, begin, width);
      next.add(o, t0, n, begin, width);
      for (Index column = 0; column < width; column += W)
        panel(t0, n, n_p, begin, column, std::min<Index>(W, width - column), next, record);
      for (Index i = 0; i < n; ++i)
        for (Index c = 0; c < width; c += W)
          store_row(Row<Scalar>(aligned_row(o_ + i * columns_ + c)),
                    o.data() + (t0 + i) * o.outerStride() + begin + c, std::min<Index>(W, width - c));
    }
    last.S.write(begin, end, K_, R_, K_ * W, a);
    last.M.write(begin, end, K_, N_, K_ * W, m);
  }

 private:
  static constexpr int W = panel_width<Scalar>;
  static constexpr Index block = 64;  // tokens planned, and copied, at a time
  // Sums of q R and of p R that a sweep forms at once, of every other row. One would wait for itself where a
  // row is one register; more registers than that are as many sums already.
  static constexpr int sums = Eigen::internal::packet_traits<Scalar>::size == W ? 2 : 1;

  // The scalars of one token, the same for every panel.
  struct Step {
    Scalar a, m;            // before the token
    Scalar fold_a, fold_m;  // what R and N are multiplied by first, if `fold`
    Scalar u;               // eta_t / m_t
    Scalar write;           // beta_t m_t / a_t
    Scalar read;            // scale a_t
    bool fold;
  };

  // Every panel reads the same rows: of one head among others they lie apart, and of another type.
  static void copy_rows(const RowsMap<const Storage>& from, Index t0, Index n, Index column, Index width,
                        Scalar* to, Index to_stride) {
    for (Index i = 0; i < n; ++i)
      for (Index c = 0; c < width; c += W)
        aligned_row(to + i * to_stride + c) = load_row<Scalar>(
            from.data() + (t0 + i) * from.outerStride() + column + c, std::min<Index>(W, width - c));
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

  // Tokens [t0, t0 + n), the panel of `width` columns from `column` on, counted from `begin`.
  void panel(Index t0, Index n, Index n_p, Index begin, Index column, Index width, Fetch<Storage>& next,
             const Record<Scalar>& record) {
    Scalar* const R = R_ + column * K_;
    Scalar* const N = N_ + column * K_;
    Row<Scalar> pR = Row<Scalar>::Zero(), qR;
    if (t0 > 0)
      pR = aligned_row(pR_ + column);
    else
      for (Index i = 0; i < K_; ++i) pR += p_[i] * aligned_row(R + i * W);

    for (Index i = 0; i < n; ++i) {
      const Step& s = steps_[i];
      next.some();
      if (record.wants_state(t0 + i))
        record.state(
            t0 + i, begin + column, width,
            [&](Index row) -> Row<Scalar> { return s.a * aligned_row(R + row * W); },
            [&](Index row) -> Row<Scalar> { return s.m * aligned_row(N + row * W); });
      Row<Scalar> u = aligned_row(v_ + i * columns_ + column) - s.a * pR;
      record.u(t0 + i, begin + column, u.head(width));
      u *= s.u;
      const Scalar *const k = k_ + i * Kp_, *const q = q_ + i * Kp_;
      const Scalar* const p = p_ + std::min(i + 1, n_p - 1) * Kp_;
      if (s.fold)
        sweep<true>(K_, s, R, N, k, q, p, u, qR, pR);
      else
        sweep<false>(K_, s, R, N, k, q, p, u, qR, pR);
      aligned_row(o_ + i * columns_ + column) = s.read * qR;
    }
    aligned_row(pR_ + column) = pR;
  }

  // One token: N and R updated, qR = q R, pR = p R. A function of its own, whose loop gets all registers.
  template <bool Fold>
  EIGEN_DONT_INLINE static void sweep(Index K, const Step& s, Scalar* R, Scalar* N, const Scalar* k,
                                      const Scalar* q, const Scalar* p, const Row<Scalar>& u, Row<Scalar>& qR,
                                      Row<Scalar>& pR) {
    const Row<Scalar> minus_u = -u;
    const Scalar minus_write = -s.write;
    Row<Scalar> from_q[sums], from_p[sums];
    unroll<sums>([&](auto j) MOMENTUM_DELTA_INLINE { from_q[j] = from_p[j] = Row<Scalar>::Zero(); });
    const auto row = [&](Index i, auto j) MOMENTUM_DELTA_INLINE {
      Row<Scalar> N_i = aligned_row(N + i * W), R_i = aligned_row(R + i * W);
      if constexpr (Fold) {
        N_i *= s.fold_m;
        R_i *= s.fold_a;
      }
      N_i = multiply_add<Scalar>(Row<Scalar>::Constant(k[i]), minus_u, N_i);
      R_i = multiply_add<Scalar>(Row<Scalar>::Constant(minus_write), N_i, R_i);
      aligned_row(N + i * W) = N_i;
      aligned_row(R + i * W) = R_i;
      from_q[j] += q[i] * R_i;
      from_p[j] += p[i] * R_i;
    };
    Index i = 0;
    for (; i + sums <= K; i += sums) unroll<sums>([&](auto j) MOMENTUM_DELTA_INLINE { row(i + j, j); });
    if (i < K) row(i, std::integral_constant<int, 0>{});
    qR = from_q[0];
    pR = from_p[0];
    if constexpr (sums == 2) {
      qR += from_q[1];
      pR += from_p[1];
    }
  }

  Index K_, Kp_, columns_;  // channels; and columns, padded
  Scalar *R_, *N_;          // a K x W panel for each W columns
  Scalar* pR_;              // p R of the next token
  Scalar *alpha_, *mu_;     // block
  Step* steps_;             // block
  Scalar *q_, *k_, *p_;     // block x Kp, and one more of p
  Scalar *v_, *o_;          // block x columns
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
