/// \file
/// One token of the momentum delta rule (forward.hpp), the state updated where it lies. Decoding is bound by
/// memory: S and M are each read and written once, a few panels of columns at a time, so that the S which
/// p_t S_{t-1} has read is still in cache for the update.
#pragma once

#include <algorithm>

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar, class Storage>
class Step {
 public:
  Step(Arena& arena, const Sizes& s)
      : K_(s.K), q_(arena.take<Scalar>(K_)), p_(arena.take<Scalar>(K_)), kt_(arena.take<Scalar>(K_)) {}

  // Columns [begin, end) of V of the one token of x. o: 1 x V, assigned.
  void operator()(const Head<Scalar, Storage>& x, Index begin, Index end, const StateRows<Scalar>& S,
                  const StateRows<Scalar>& M, RowsMap<Storage> o) {
    convert(x.q.data(), q_, K_);
    convert(x.p.data(), p_, K_);
    convert(x.k.data(), kt_, K_);
    for (Index i = 0; i < K_; ++i) {
      q_[i] *= x.scale;
      kt_[i] *= x.eta[0];
    }
    const Gates gates{decay(x.log_alpha[0]), decay(x.log_mu[0]), x.beta[0]};
    const auto columns = [&]<int Panels>(std::integral_constant<int, Panels>, Index column, Index width) {
      panels<Panels>(gates, x.v.data() + column, S.from(column), M.from(column), width, o.data() + column);
    };
    Index column = begin;
    for (; end - column >= together * W; column += together * W)
      columns(std::integral_constant<int, together>{}, column, W);
    for (; end - column >= 2 * W; column += 2 * W) columns(std::integral_constant<int, 2>{}, column, W);
    for (; column < end; column += W)
      columns(std::integral_constant<int, 1>{}, column, std::min<Index>(W, end - column));
  }

 private:
  static constexpr int W = panel_width<Scalar>;
  static constexpr int together = tile_rows;  // panels; u or o of them stay in registers

  struct Gates {
    Scalar alpha, mu, beta;
  };

  // `Panels` panels, of which the last has `width` columns, the others W.
  template <int Panels>
  EIGEN_DONT_INLINE void panels(const Gates& gates, const Storage* v, const StateRows<Scalar>& S,
                                const StateRows<Scalar>& M, Index width, Storage* o) const {
    const Scalar alpha = gates.alpha, mu = gates.mu, beta = gates.beta;
    const Index last = Panels == 1 ? width : W;
    Row<Scalar> u[Panels], o_t[Panels];
    unroll<Panels>([&](auto j) MOMENTUM_DELTA_INLINE {
      u[j] = load_row<Scalar>(v + j * W, last);
      o_t[j].setZero();
    });
    for (Index i = 0; i < K_; ++i) {
      const Scalar* const S_i = S.data + i * S.stride;
      unroll<Panels>([&](auto j) MOMENTUM_DELTA_INLINE {
        u[j] = multiply_add<Scalar>(Row<Scalar>::Constant(-p_[i]), load_row<Scalar>(S_i + j * W, last), u[j]);
      });
    }
    for (Index i = 0; i < K_; ++i) {
      Scalar *const S_i = S.data + i * S.stride, *const M_i = M.data + i * M.stride;
      unroll<Panels>([&](auto j) MOMENTUM_DELTA_INLINE {
        const Row<Scalar> M_ij = multiply_add<Scalar>(Row<Scalar>::Constant(-kt_[i]), u[j],
                                                      mu * load_row<Scalar>(M_i + j * W, last));
        const Row<Scalar> S_ij = multiply_add<Scalar>(Row<Scalar>::Constant(-beta), M_ij,
                                                      alpha * load_row<Scalar>(S_i + j * W, last));
        store_row(M_ij, M_i + j * W, last);
        store_row(S_ij, S_i + j * W, last);
        o_t[j] = multiply_add<Scalar>(Row<Scalar>::Constant(q_[i]), S_ij, o_t[j]);
      });
    }
    unroll<Panels>([&](auto j) MOMENTUM_DELTA_INLINE { store_row(o_t[j], o + j * W, last); });
  }

  Index K_;
  Scalar *q_, *p_, *kt_;  // 1 x K
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
