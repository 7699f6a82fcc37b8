/// \file
/// The recurrence (forward.hpp) at the speed of the machine: a panel of V columns of S and M stays in the
/// innermost cache while the tokens pass, and one sweep over its K rows for each token, or for two, updates M
/// and S and reads all that it and the next one need, so that every element is loaded and stored once.
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
///
/// The second of two tokens of a sweep reads a state that is nowhere whole. From the sums with the state
/// before both, R_0 and N_0, and with x_1 = u_1 eta_1 / m_1 and w_1 = beta_1 m_1 / a_1 of the first,
///
///     p_2 R_1 = p_2 R_0 - w_1 (p_2 N_0 - (p_2 k_1) x_1)
///
/// Its rounding errors are relative to R_0, and would be seen where the first token overwrites a much larger
/// value: such tokens have a sweep each. p_2 k_1 must be in the range of Scalar.
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
        sums_(arena.take<Scalar>(3 * columns_)),
        alpha_(arena.take<Scalar>(block)),
        mu_(arena.take<Scalar>(block)),
        steps_(arena.take<Step>(block)),
        q_(arena.take<Scalar>(block * Kp_)),
        k_(arena.take<Scalar>(block * Kp_)),
        p_(arena.take<Scalar>((block + 2) * Kp_)),
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
      const Index n_p = std::min(n + 2, x.T() - t0);  // a sweep also reads p of the next two tokens
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
  // Tokens of a sweep. Two where a row is one register: two sweeps of one token each, with twice the stores,
  // take longer there. With more registers a row, multiply-adds are what a sweep waits for, of which two
  // tokens take nine an element instead of eight.
  static constexpr int together = Eigen::internal::packet_traits<Scalar>::size == W ? 2 : 1;

  // The scalars of one token, the same for every panel.
  struct Step {
    Scalar a, m;            // before the token
    Scalar fold_a, fold_m;  // what R and N are multiplied by first, if `fold`
    Scalar u;               // eta_t / m_t
    Scalar write;           // beta_t m_t / a_t
    Scalar read;            // scale a_t
    bool fold;
    Scalar pk;  // p_t k_{t-1}, within the block
  };

  // What the next two tokens read of R and N as they stand before both: p_1 R, p_2 R, p_2 N.
  struct Sums {
    Row<Scalar> p1_R, p2_R, p2_N;
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
    for (Index i = 1; together == 2 && i < n; ++i) {
      Row<Scalar> pk = Row<Scalar>::Zero();
      for (Index c = 0; c < Kp_; c += W)
        pk += aligned_row(p_ + i * Kp_ + c) * aligned_row(k_ + (i - 1) * Kp_ + c);
      steps_[i].pk = lane_sum<Scalar>(pk);
    }
  }

  // Tokens [t0, t0 + n), the panel of `width` columns from `column` on, counted from `begin`.
  void panel(Index t0, Index n, Index n_p, Index begin, Index column, Index width, Fetch<Storage>& next,
             const Record<Scalar>& record) {
    Scalar* const R = R_ + column * K_;
    Scalar* const N = N_ + column * K_;
    Scalar* const kept = sums_ + 3 * column;
    Sums sums = t0 > 0 ? Sums{aligned_row(kept), aligned_row(kept + W), aligned_row(kept + 2 * W)}
                       : first_sums(R, N, n_p);

    // u_i eta_i / m_i of token i, from p_i R. R_row, N_row: rows of the state before it.
    const auto correction = [&](Index i, const Row<Scalar>& pR, const auto& R_row,
                                const auto& N_row) -> Row<Scalar> {
      const Step& s = steps_[i];
      if (record.wants_state(t0 + i))
        record.state(
            t0 + i, begin + column, width, [&](Index row) -> Row<Scalar> { return s.a * R_row(row); },
            [&](Index row) -> Row<Scalar> { return s.m * N_row(row); });
      const Row<Scalar> u = aligned_row(v_ + i * columns_ + column) - s.a * pR;
      record.u(t0 + i, begin + column, u.head(width));
      return s.u * u;
    };
    const auto R_0 = [&](Index row) { return aligned_row(R + row * W); };
    const auto N_0 = [&](Index row) { return aligned_row(N + row * W); };

    for (Index i = 0, tokens; i < n; i += tokens) {
      const Step* const s = steps_ + i;
      const Scalar *const k = k_ + i * Kp_, *const q = q_ + i * Kp_;
      Row<Scalar> x[together], qR[together];
      x[0] = correction(i, sums.p1_R, R_0, N_0);
      bool fold = s[0].fold;
      tokens = 1;
      if constexpr (together == 2) {
        // A row of N and of R after the first token, or a sum of rows
        const auto next_N = [&](const Row<Scalar>& N_row, Scalar k_row) -> Row<Scalar> {
          return multiply_add<Scalar>(Row<Scalar>::Constant(k_row), -x[0], s[0].fold_m * N_row);
        };
        const auto next_R = [&](const Row<Scalar>& R_row, const Row<Scalar>& next_N_row) -> Row<Scalar> {
          return multiply_add<Scalar>(Row<Scalar>::Constant(-s[0].write), next_N_row, s[0].fold_a * R_row);
        };
        const auto N_1 = [&](Index row) { return next_N(N_0(row), k[row]); };
        const auto R_1 = [&](Index row) { return next_R(R_0(row), N_1(row)); };
        if (i + 1 < n) {
          const Row<Scalar> p2_R1 = next_R(sums.p2_R, next_N(sums.p2_N, s[1].pk));
          if (!cancels(i + 1, column, s[0].fold_a * sums.p2_R, p2_R1)) {
            x[1] = correction(i + 1, p2_R1, R_1, N_1);
            fold |= s[1].fold;
            tokens = 2;
          }
        }
      }
      const Scalar* p[together];  // of the next tokens
      for (Index j = 0; j < together; ++j) p[j] = p_ + std::min(i + tokens + j, n_p - 1) * Kp_;
      for (Index j = 0; j < tokens; ++j) next.some();
      const auto with = [&](auto of) {
        if (fold)
          sweep<of, true>(K_, Kp_, s, R, N, k, q, p, x, qR, sums);
        else
          sweep<of, false>(K_, Kp_, s, R, N, k, q, p, x, qR, sums);
      };
      if (tokens == together)
        with(std::integral_constant<int, together>{});
      else
        with(std::integral_constant<int, 1>{});
      for (Index j = 0; j < tokens; ++j) aligned_row(o_ + (i + j) * columns_ + column) = s[j].read * qR[j];
    }
    aligned_row(kept) = sums.p1_R;
    aligned_row(kept + W) = sums.p2_R;
    aligned_row(kept + 2 * W) = sums.p2_N;
  }

  // Is p_i R of token i in some column so much smaller than `before`, what it was before the token before it,
  // and v_i as well, that the rounding errors of a difference would be seen?
  bool cancels(Index i, Index column, const Row<Scalar>& before, const Row<Scalar>& pR) const {
    const Row<Scalar> v = aligned_row(v_ + i * columns_ + column);
    const Scalar a = steps_[i].a;
    return any_greater<Scalar>((a * before).abs(), Scalar(64) * (v.abs() + (a * pR).abs()));
  }

  // Of the first tokens, of which there are n_p.
  Sums first_sums(const Scalar* R, const Scalar* N, Index n_p) const {
    Sums sums{Row<Scalar>::Zero(), Row<Scalar>::Zero(), Row<Scalar>::Zero()};
    for (Index i = 0; i < K_; ++i) sums.p1_R += p_[i] * aligned_row(R + i * W);
    if (together == 1 || n_p == 1) return sums;
    const Scalar* const p2 = p_ + Kp_;
    for (Index i = 0; i < K_; ++i) {
      sums.p2_R += p2[i] * aligned_row(R + i * W);
      sums.p2_N += p2[i] * aligned_row(N + i * W);
    }
    return sums;
  }

  // One or two tokens, with rows of k and q `stride` apart: N and R updated, q R of each, and the sums with
  // the p of the next ones. A function of its own, whose loop gets all registers.
  template <int tokens, bool Fold>
  EIGEN_DONT_INLINE static void sweep(Index K, Index stride, const Step* s, Scalar* R, Scalar* N,
                                      const Scalar* k, const Scalar* q, const Scalar* const (&p)[together],
                                      const Row<Scalar> (&x)[together], Row<Scalar> (&qR)[together],
                                      Sums& sums) {
    const auto add = [](Row<Scalar>& sum, Scalar factor, const Row<Scalar>& row) MOMENTUM_DELTA_INLINE {
      sum = multiply_add<Scalar>(Row<Scalar>::Constant(factor), row, sum);
    };
    const Scalar *const p1 = p[0], *const p2 = p[together - 1];
    Row<Scalar> minus_x[tokens], q_R[tokens];
    Scalar minus_write[tokens];
    unroll<tokens>([&](auto j) MOMENTUM_DELTA_INLINE {
      minus_x[j] = -x[j];
      minus_write[j] = -s[j].write;
      q_R[j] = Row<Scalar>::Zero();
    });
    Row<Scalar> p1_R = Row<Scalar>::Zero(), p2_R = p1_R, p2_N = p1_R;
    for (Index i = 0; i < K; ++i) {
      Row<Scalar> N_i = aligned_row(N + i * W), R_i = aligned_row(R + i * W);
      unroll<tokens>([&](auto j) MOMENTUM_DELTA_INLINE {
        if constexpr (Fold) {
          N_i *= s[j].fold_m;
          R_i *= s[j].fold_a;
        }
        add(N_i, k[j * stride + i], minus_x[j]);
        add(R_i, minus_write[j], N_i);
        add(q_R[j], q[j * stride + i], R_i);
      });
      aligned_row(N + i * W) = N_i;
      aligned_row(R + i * W) = R_i;
      add(p1_R, p1[i], R_i);
      if constexpr (together == 2) {
        add(p2_R, p2[i], R_i);
        add(p2_N, p2[i], N_i);
      }
    }
    unroll<tokens>([&](auto j) MOMENTUM_DELTA_INLINE { qR[j] = q_R[j]; });
    sums = {p1_R, p2_R, p2_N};
  }

  Index K_, Kp_, columns_;  // channels; and columns, padded
  Scalar *R_, *N_;          // a K x W panel for each W columns
  Scalar* sums_;            // Sums for each W columns
  Scalar *alpha_, *mu_;     // block
  Step* steps_;             // block
  Scalar *q_, *k_, *p_;     // block x Kp, and two more of p
  Scalar *v_, *o_;          // block x columns
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
