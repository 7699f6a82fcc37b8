/// \file
/// Gradients of the chunk form (forward.hpp), chunk by chunk in reverse. From do, dS_n, dM_n:
///
///     kS = kt dS_n, kM = kt dM_n
///     du  = Q^T do + G_n .* kS - D_n .* kM
///     dR  = (I + N)^{-T} du                                     by the right-hand side of the solve; dv = dR
///     X   = -(dR u^T)_{j<t} .* G_{t-1,j}                        by p_t . kt_j
///     Y   = (do u^T)_{j<=t} .* G_tj                             by q_t . kt_j
///     dq  = A_t (do S_0^T) - b_t (do M_0^T) + Y kt
///     dp  = -A_{t-1} (dR S_0^T) + b_{t-1} (dR M_0^T) + X kt
///     dkt = Y^T q + X^T p + G_n .* (u dS_n^T) - D_n .* (u dM_n^T)
///     dS_0 = A_n dS_n + q^T (A_t do) - p^T (A_{t-1} dR)
///     dM_0 = -b_n dS_n + m_n dM_n - q^T (b_t do) + p^T (b_{t-1} dR)
///
/// and by the mask, whose own gradients are in decay_mask.hpp,
///
///     dG_tj = (do u^T)_tj (q kt^T)_tj - (dR u^T)_{t+1,j} (p kt^T)_{t+1,j};  row n also kS_j . u_j
///     dA_t  = do_t . (q_t S_0) - dR_{t+1} . (p_{t+1} S_0);                  A_n also <dS_n, S_0>
///     db_t  = -do_t . (q_t M_0) + dR_{t+1} . (p_{t+1} M_0);                 b_n also -<dS_n, M_0>
///     dD_nj = -kM_j . u_j;  dm_n = <dM_n, M_0>
///
/// (do_t . (q_t S_0) is q_t . (do_t S_0^T), which dq has computed; kS_j . u_j is kt_j . (u_j dS_n^T).)
/// Last, dq *= scale, dk = eta dkt, deta = k . dkt.
///
/// Products with S_0^T, M_0^T, dS_n^T and dM_n^T are computed transposed, (do S_0^T)^T = S_0 do^T: the small
/// matrix is transposed, not the state.
#pragma once

#include <algorithm>

#include "momentum_delta/chunk/forward.hpp"
#include "momentum_delta/detail/head_gradients.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar, class Storage>
class ChunkBackward {
 public:
  // For the value heads of a group, in chunks of chunk_size with `interval` of them between two checkpoints.
  ChunkBackward(Arena& arena, const Sizes& s, Index chunk_size, Index interval)
      : K(s.K),
        V(s.V),
        panels((s.V + W - 1) / W),
        c(arena, chunk_size, s.K),
        Kp(c.Kp),
        C(c.C),
        states_(arena.take<Scalar>(interval * 2 * panels * Kp * W)),
        gradients_(arena.take<Scalar>(s.HV / std::max<Index>(s.HK, 1) * 2 * panels * Kp * W)),
        u(arena.take<Scalar>(panels * C * W)),
        do_(arena.take<Scalar>(panels * C * W)),
        dR(arena.take<Scalar>(panels * C * W)),
        uT(arena.take<Scalar>(panels * W * C)),
        doT(arena.take<Scalar>(panels * W * C)),
        dRT(arena.take<Scalar>(panels * W * C)),
        X(arena.take<Scalar>(C * C)),
        Y(arena.take<Scalar>(C * C)),
        dqT(arena.take<Scalar>(Kp * C)),
        dpT(arena.take<Scalar>(Kp * C)),
        dktT(arena.take<Scalar>(Kp * C)),
        dq(arena.take<Scalar>(C * Kp)),
        dp(arena.take<Scalar>(C * Kp)),
        dkt(arena.take<Scalar>(C * Kp)),
        by_token(arena.take<Scalar>(6 * C)),
        dmask(arena, chunk_size) {}

  // Head `member` of the group, from the gradients by the state after its last token ..
  void begin(Index member, const StatePair<const Scalar>& dlast) {
    const State g = pair(gradients_, member);
    dlast.S.read(0, V, K, g.S(0).data, Kp * W, 2 * Kp * W);
    dlast.M.read(0, V, K, g.M(0).data, Kp * W, 2 * Kp * W);
  }
  // .. over the tokens from checkpoint number `checkpoint` to the next, for each in reverse ..
  void operator()(Index member, const Head<Scalar, Storage>& x, const Recorded<Scalar>& saved,
                  Index checkpoint, const HeadGradients<Scalar, Storage>& g) {
    const Index size = saved.chunk_size(), begin = saved.begin(checkpoint), end = saved.end(checkpoint);
    const Index last = (end - begin - 1) / size;  // chunk of the interval
    const ConstState first = first_state(saved, checkpoint);
    const auto state_before = [&](Index i) {
      const State own = state(i);
      return i == 0 ? first : ConstState{own.data, own.size};
    };
    for (Index i = 0; i < last; ++i) {
      rebuild(x, saved, begin + i * size, size, state_before(i));
      c.form_k_rows(size);
      const State next = state(i + 1);
      std::copy_n(state_before(i).data, 2 * panels * Kp * W, next.data);
      by_panels(panels, 1, [&](auto P, Index panel) {
        c.template carry<P>(size, of_tokens(u, panel), next.S(panel), next.M(panel), [] {});
      });
    }
    for (Index i = last; i >= 0; --i) {
      const Index t0 = begin + i * size, n = std::min(size, end - t0);
      rebuild(x, saved, t0, n, state_before(i));
      chunk(x, t0, n, size, state_before(i), pair(gradients_, member), g);
    }
  }
  // .. to those by the state before its first.
  void end(Index member, const StatePair<Scalar>& dfirst, bool add) {
    const State g = pair(gradients_, member);
    dfirst.S.write(0, V, K, g.S(0).data, 2 * Kp * W, Scalar(1), add);
    dfirst.M.write(0, V, K, g.M(0).data, 2 * Kp * W, Scalar(1), add);
  }

 private:
  static constexpr int W = panel_width<Scalar>;
  static constexpr int R = tile_rows;
  using Lanes = Row<Scalar>;

  // For each W columns of V a Kp x W panel of S, then one of M. (As Saved has them, if no column or channel
  // is padded.)
  template <class T>
  struct Panels {
    T* data;
    Index size;
    PanelRows<T> S(Index panel) const { return {data + 2 * panel * size, 2 * size}; }
    PanelRows<T> M(Index panel) const { return {data + (2 * panel + 1) * size, 2 * size}; }
  };
  using State = Panels<Scalar>;
  using ConstState = Panels<const Scalar>;
  State pair(Scalar* states, Index i) const { return {states + i * 2 * panels * Kp * W, Kp * W}; }
  State state(Index chunk) const { return pair(states_, chunk); }

  // The state at a checkpoint, where it is or in state(0).
  ConstState first_state(const Recorded<Scalar>& saved, Index checkpoint) const {
    const State own = state(0);
    const Scalar* in_place = nullptr;
    const bool as_saved = K == Kp && V % W == 0 && V > 0;
    saved.state(checkpoint, [&](Index column, Index width, const Scalar* S, const Scalar* M) {
      if (column == 0) in_place = S;
      if (as_saved) return;
      load_rows(Rows{S, width}, 0, K, 0, width, Kp, own.S(column / W).data);
      load_rows(Rows{M, width}, 0, K, 0, width, Kp, own.M(column / W).data);
    });
    return {as_saved ? in_place : own.data, Kp * W};
  }

  // What the forward pass had of the tokens [t0, t0 + n), up to u.
  void rebuild(const Head<Scalar, Storage>& x, const Recorded<Scalar>& saved, Index t0, Index n,
               const ConstState& s) {
    c.load(x, t0, n);
    if (!saved.has_u()) c.form_p_tiles(n);
    for (Index panel = 0; panel < panels; ++panel) {
      const Index column = panel * W, width = std::min<Index>(W, V - column);
      Scalar* const u_p = u + panel * C * W;
      if (saved.has_u())
        load_rows(Rows{saved.u(0), saved.u_stride()}, t0, n, column, width, c.padded(n), u_p);
      else
        load_rows(x.v, t0, n, column, width, c.padded(n), u_p);
    }
    if (!saved.has_u())
      by_panels(panels, 1, [&](auto P, Index panel) {
        c.template solve_u<P>(n, s.S(panel), s.M(panel), of_tokens(u, panel), [] {});
      });
  }

  // Tokens [t0, t0 + n), rebuilt in c and u; size: tokens of the chunk before; s: the state before them; gs:
  // gradients by the state after them, then by the state before.
  void chunk(const Head<Scalar, Storage>& x, Index t0, Index n, Index size, const ConstState& s,
             const State& gs, const HeadGradients<Scalar, Storage>& g) {
    const Index rows = c.padded(n);
    Fetch<Storage> next;  // what the chunk before this one will read
    if (const Index before = std::min(t0, size); before > 0) {
      for (const auto* tensor : {&x.q, &x.k, &x.p}) next.add(*tensor, t0 - before, before, 0, K);
      if (g.do_)
        next.add(RowsMap<const Storage>(g.do_, x.T(), V, Eigen::OuterStride<>(g.do_stride)), t0 - before,
                 before, 0, V);
    }
    c.form_k_tiles(n);
    c.form_q_rows(n);
    c.form_p_rows(n);

    // By A_n, b_n, m_n; and du = Q^T do + G_n .* kS - D_n .* kM, dR = (I + N)^{-T} du in its place
    Lanes dA_n = Lanes::Zero(), db_n = Lanes::Zero(), dm_n = Lanes::Zero();
    for (Index panel = 0; panel < panels; ++panel) {
      by_last_decays(s.S(panel).data, s.M(panel).data, gs.S(panel).data, gs.M(panel).data, dA_n, db_n, dm_n);
      const Index column = panel * W, width = std::min<Index>(W, V - column), at = panel * C * W;
      if (g.do_)
        load_rows(Rows{g.do_, g.do_stride}, t0, n, column, width, rows, do_ + at);  // n x V
      else
        std::fill(do_ + at, do_ + at + rows * W, Scalar(0));
    }
    by_panels(panels, 1, [&](auto P, Index panel) {
      for (Index i = round_up(n, R) - R; i >= 0; i -= R)
        dR_tile<P>(i, n, gs.S(panel), gs.M(panel), of_tokens(do_, panel), of_tokens(dR, panel)),  // n x V
            next.some();
    });
    for (Index panel = 0; panel < panels; ++panel) {
      const Index column = panel * W, width = std::min<Index>(W, V - column), at = panel * C * W;
      std::fill(dR + at + round_up(n, R) * W, dR + at + rows * W, Scalar(0));
      g.dv.put(t0, n, column, width, dR + at, W);
      transpose(u + at, W, rows, W, uT + at, C);
      transpose(do_ + at, W, rows, W, doT + at, C);
      transpose(dR + at, W, rows, W, dRT + at, C);
    }

    // Gradients by the products: X of p_t . kt_j, j < t, and Y of q_t . kt_j, j <= t; and by G_tj
    for (Index i = 0; i < n; i += R) by_panels(i + R, W, [&](auto P, Index j) { Y_tile<P>(i, j, n); });
    for (Index i = 0; i < n; i += R) by_panels(i + R, W, [&](auto P, Index j) { X_tile<P>(i, j, n); });

    // dq, dp and dkt by the state, and by A, b, G_n, D_n, a token in each lane
    std::fill(by_token, by_token + 6 * C, Scalar(0));
    by_panels(rows, W, [&](auto P, Index t) {
      for (Index i = 0; i < K; i += R) {
        read_tile<P>(i, t, s, Scalar(1), c.qT, doT, c.mask.A_from(1), c.mask.b_from(1), dqT, dA_q(), db_q());
        read_tile<P>(i, t, s, Scalar(-1), c.pT, dRT, c.mask.A_from(0), c.mask.b_from(0), dpT, dA_p(), db_p());
        dkt_tile<P>(i, t, n, gs);
        next.some();
      }
    });
    for (Scalar* const xT : {dqT, dpT, dktT})  // channels of no tile
      for (Index i = round_up(K, R); i < Kp; ++i) std::fill_n(xT + i * C, rows, Scalar(0));
    transpose(dqT, C, Kp, rows, dq, Kp);
    transpose(dpT, C, Kp, rows, dp, Kp);
    transpose(dktT, C, Kp, rows, dkt, Kp);

    // and inside the chunk: dq += Y kt, dp += X kt, dkt += Y^T q + X^T p
    for (Index i = 0; i < n; i += R) {
      by_panels(K, W, [&](auto P, Index channel) {
        dq_inner_tile<P>(i, channel, x.scale);
        dp_inner_tile<P>(i, channel);
        dkt_inner_tile<P>(i, channel, n);
      });
    }
    g.dq.put(t0, n, 0, K, dq, Kp);
    for (Index j = 0; j < n; ++j) {
      const Scalar eta = x.eta[t0 + j];
      Lanes deta = Lanes::Zero();
      for (Index channel = 0; channel < K; channel += W) {
        auto row = aligned_row(dkt + j * Kp + channel);
        deta += aligned_row(c.k + j * Kp + channel) * row;
        row *= eta;
      }
      g.deta.put(t0 + j, lane_sum<Scalar>(deta));
    }
    g.dk.put(t0, n, 0, K, dkt, Kp);
    g.dp.put(t0, n, 0, K, dp, Kp);  // after dk, to which it adds if p is k

    // dS_0 and dM_0
    by_panels(panels, 1, [&](auto P, Index panel) {
      for (Index i = 0; i < K; i += R) dstate_tile<P>(panel, i, n, gs), next.some();
    });

    // By the mask
    for (Index t = 0; t <= n; ++t) {
      dmask.A[t] = (t > 0 ? dA_q()[t - 1] : Scalar(0)) + (t < n ? dA_p()[t] : Scalar(0));
      dmask.b[t] = (t > 0 ? db_q()[t - 1] : Scalar(0)) + (t < n ? db_p()[t] : Scalar(0));
    }
    dmask.A[n] += lane_sum<Scalar>(dA_n);
    dmask.b[n] += lane_sum<Scalar>(db_n);
    dmask.m = lane_sum<Scalar>(dm_n);
    for (Index j = 0; j < n; ++j) dmask.G[n * c.mask.stride() + j] += dG_n()[j];
    std::copy(dD_n(), dD_n() + c.mask.stride(), dmask.D);
    c.mask.backward(n, dmask, [&](Index i, Scalar dlog_alpha, Scalar dlog_mu, Scalar dbeta) {
      g.dlog_alpha.put(t0 + i, dlog_alpha);
      g.dlog_mu.put(t0 + i, dlog_mu);
      g.dbeta.put(t0 + i, dbeta);
    });
  }

  // What the lanes of a panel contribute to dA_n = <dS_n, S_0>, db_n = -<dS_n, M_0>, dm_n = <dM_n, M_0>. This
  // comes first, for it reads the recorded S and M in order.
  EIGEN_DONT_INLINE void by_last_decays(const Scalar* S, const Scalar* M, const Scalar* dS, const Scalar* dM,
                                        Lanes& dA, Lanes& db, Lanes& dm) const {
    Lanes A = Lanes::Zero(), b = Lanes::Zero(), m = Lanes::Zero();
    for (Index i = 0; i < K * W; i += W) {
      const Lanes dS_i = aligned_row(dS + i), M_i = aligned_row(M + i);
      A += dS_i * aligned_row(S + i);
      b -= dS_i * M_i;
      m += aligned_row(dM + i) * M_i;
    }
    dA += A;
    db += b;
    dm += m;
  }

  // The panels of a C x V array from number `panel` on.
  PanelRows<Scalar> of_tokens(Scalar* array, Index panel) const { return {array + panel * C * W, C * W}; }

  // Rows [i, i + R) of dR in P panels of V. Later rows are there already.
  template <int P>
  EIGEN_DONT_INLINE void dR_tile(Index i, Index n, PanelRows<const Scalar> dS, PanelRows<const Scalar> dM,
                                 PanelRows<const Scalar> do_p, PanelRows<Scalar> dR_p) const {
    Tile<Scalar, P> rows;
    rows.set_zero();
    rows.add_both(c.k_tiles + i * 2 * Kp, dS, dM, K);
    const Index later = std::min(i + R, n);
    rows.add(c.Q + later * C + i, 1, C, do_p + later * W, W, n - later);
    rows.subtract(c.N + later * C + i, 1, C, dR_p + later * W, W, n - later);
    rows.add_lower_transposed(c.Q + i * C + i, C, do_p + i * W, W);
    rows.solve_unit_lower_transposed(c.N + i * C + i, C);
    rows.store(dR_p + i * W, W);
  }

  // rows_i = sum_v a_iv bT_vj over all panels: rows [i, i + R) of a, P W tokens of bT from j on.
  template <int P>
  EIGEN_ALWAYS_INLINE void product_with_tokens(Tile<Scalar, P>& rows, const PanelRows<const Scalar>& a,
                                               const Scalar* bT) const {
    rows.set_zero();
    for (Index panel = 0; panel < panels; ++panel)
      rows.add(a.data + panel * a.between, W, 1, PanelRows<const Scalar>(bT + panel * W * C, W), C, W);
  }

  // Y = (do u^T)_{j<=t} .* G_tj, and dG_tj of it.
  template <int P>
  EIGEN_DONT_INLINE void Y_tile(Index i, Index first, Index n) {
    Tile<Scalar, P> dou;
    product_with_tokens(dou, of_tokens(do_, 0) + i * W, uT + first);
    Chunk<Scalar>::template each_row<P>([&](auto r, auto panel) MOMENTUM_DELTA_INLINE {
      const Index row = i + r, t = row + 1, j = first + panel * W;
      if (row >= n) aligned_row(Y + row * C + j).setZero();
      if (row >= n || j > row) return;
      const Lanes kept = first_lanes<Scalar>(dou.row(r, panel), t - j);
      aligned_row(Y + row * C + j) = kept * aligned_row(c.mask.G(t) + j);
      aligned_row(dmask.G + t * c.mask.stride() + j) =
          kept * first_lanes<Scalar>(aligned_row(c.qk + row * C + j), t - j);
    });
  }
  // X = -(dR u^T)_{j<t} .* G_{t-1,j}, and dG_{t-1,j} of it.
  template <int P>
  EIGEN_DONT_INLINE void X_tile(Index i, Index first, Index n) {
    Tile<Scalar, P> dRu;
    product_with_tokens(dRu, of_tokens(dR, 0) + i * W, uT + first);
    Chunk<Scalar>::template each_row<P>([&](auto r, auto panel) MOMENTUM_DELTA_INLINE {
      const Index row = i + r, j = first + panel * W;
      if (row >= n) aligned_row(X + row * C + j).setZero();
      if (row >= n || j >= row) return;
      const Lanes kept = -first_lanes<Scalar>(dRu.row(r, panel), row - j);
      aligned_row(X + row * C + j) = kept * aligned_row(c.mask.G(row) + j);
      aligned_row(dmask.G + row * c.mask.stride() + j) +=
          kept * first_lanes<Scalar>(aligned_row(c.pk + row * C + j), row - j);
    });
  }

  // Rows [i, i + R), lanes [t, t + P W) of what a reading of the state gives back, y = A (x S_0) - b (x M_0)
  // with gradient dy:
  //   dx = A (dy S_0^T) - b (dy M_0^T), dA = x . (dy S_0^T), db = -x . (dy M_0^T)
  // all with the sign `sign`: + for o, where x is q, - for u, where x is p and A, b are those of t - 1.
  template <int P>
  EIGEN_DONT_INLINE void read_tile(Index i, Index t, const ConstState& s, Scalar sign, const Scalar* xT,
                                   const Scalar* dyT, const Scalar* A_t, const Scalar* b_t, Scalar* dxT,
                                   Scalar* dA_t, Scalar* db_t) {
    Tile<Scalar, P> dyS, dyM;
    product_with_tokens(dyS, s.S(0) + i * W, dyT + t);
    product_with_tokens(dyM, s.M(0) + i * W, dyT + t);
    unroll<P>([&](auto panel) MOMENTUM_DELTA_INLINE {
      const Index at = t + panel * W;
      const Lanes A = sign * Eigen::Map<const Lanes>(A_t + at), b = sign * Eigen::Map<const Lanes>(b_t + at);
      Lanes dA = aligned_row(dA_t + at), db = aligned_row(db_t + at);
      unroll<R>([&](auto r) MOMENTUM_DELTA_INLINE {
        const Lanes x_r = sign * aligned_row(xT + (i + r) * C + at);
        dA += x_r * dyS.row(r, panel);
        db -= x_r * dyM.row(r, panel);
        aligned_row(dxT + (i + r) * C + at) =
            multiply_add<Scalar>(-b, dyM.row(r, panel), A * dyS.row(r, panel));
      });
      aligned_row(dA_t + at) = dA;
      aligned_row(db_t + at) = db;
    });
  }
  // dkt = G_n .* (u dS_n^T) - D_n .* (u dM_n^T), dG_nj = kt_j . (u dS_n^T)_j, dD_nj = -kt_j . (u dM_n^T)_j
  template <int P>
  EIGEN_DONT_INLINE void dkt_tile(Index i, Index t, Index n, const State& gs) {
    Tile<Scalar, P> udS, udM;
    product_with_tokens<P>(udS, gs.S(0) + i * W, uT + t);
    product_with_tokens<P>(udM, gs.M(0) + i * W, uT + t);
    unroll<P>([&](auto panel) MOMENTUM_DELTA_INLINE {
      const Index at = t + panel * W;
      const bool some = at < n;
      const Lanes G = some ? Lanes(aligned_row(c.mask.G(n) + at)) : Lanes(Lanes::Zero());
      const Lanes D = some ? Lanes(aligned_row(c.mask.D(n) + at)) : Lanes(Lanes::Zero());
      Lanes dG = aligned_row(dG_n() + at), dD = aligned_row(dD_n() + at);
      unroll<R>([&](auto r) MOMENTUM_DELTA_INLINE {
        const Lanes kt_r = aligned_row(c.kT + (i + r) * C + at);
        dG += kt_r * udS.row(r, panel);
        dD -= kt_r * udM.row(r, panel);
        aligned_row(dktT + (i + r) * C + at) =
            multiply_add<Scalar>(-D, udM.row(r, panel), G * udS.row(r, panel));
      });
      aligned_row(dG_n() + at) = dG;
      aligned_row(dD_n() + at) = dD;
    });
  }

  // Rows [i, i + R), P W channels of dq = scale (dq + Y kt), of dp += X kt, of dkt += Y^T q + X^T p.
  template <int P>
  EIGEN_DONT_INLINE void dq_inner_tile(Index i, Index channel, Scalar scale) {
    const PanelRows<Scalar> to(dq + i * Kp + channel, W);
    const PanelRows<const Scalar> kt(c.kt + channel, W);
    Tile<Scalar, P> rows;
    rows.load(to, Kp);
    rows.add(Y + i * C, C, 1, kt, Kp, i);
    rows.add_lower(Y + i * C + i, C, kt + i * Kp, Kp);
    rows.scale(scale);
    rows.store(to, Kp);
  }
  template <int P>
  EIGEN_DONT_INLINE void dp_inner_tile(Index i, Index channel) {
    const PanelRows<Scalar> to(dp + i * Kp + channel, W);
    const PanelRows<const Scalar> kt(c.kt + channel, W);
    Tile<Scalar, P> rows;
    rows.load(to, Kp);
    rows.add(X + i * C, C, 1, kt, Kp, i);
    rows.add_strictly_lower(X + i * C + i, C, kt + i * Kp, Kp);
    rows.store(to, Kp);
  }
  template <int P>
  EIGEN_DONT_INLINE void dkt_inner_tile(Index i, Index channel, Index n) {
    const Index later = std::min(i + R, n);
    const PanelRows<Scalar> to(dkt + i * Kp + channel, W);
    const PanelRows<const Scalar> q(c.q + channel, W), p(c.p + channel, W);
    Tile<Scalar, P> rows;
    rows.load(to, Kp);
    rows.add(Y + later * C + i, 1, C, q + later * Kp, Kp, n - later);
    rows.add(X + later * C + i, 1, C, p + later * Kp, Kp, n - later);
    rows.add_lower_transposed(Y + i * C + i, C, q + i * Kp, Kp);
    rows.add_strictly_lower_transposed(X + i * C + i, C, p + i * Kp, Kp);
    rows.store(to, Kp);
  }

  // Rows [i, i + R) of P panels of
  // dS_0 = A_n dS_n + q^T (A_t do) - p^T (A_{t-1} dR)
  // dM_0 = -b_n dS_n + m_n dM_n - q^T (b_t do) + p^T (b_{t-1} dR)
  template <int P>
  EIGEN_DONT_INLINE void dstate_tile(Index panel, Index i, Index n, const State& gs) const {
    const Scalar A = c.mask.A(n), b = c.mask.b(n), m = c.mask.m(n);
    const PanelRows<Scalar> dS = gs.S(panel) + i * W, dM = gs.M(panel) + i * W;
    const PanelRows<const Scalar> do_p = of_tokens(do_, panel), dR_p = of_tokens(dR, panel);
    Tile<Scalar, P> rows;
    rows.load(dM, W);
    rows.scale(m);
    rows.add_scaled(-b, dS, W);
    rows.add(c.q_rows + Kp + i, 1, 2 * Kp, do_p, W, n);
    rows.add(c.p_rows + Kp + i, 1, 2 * Kp, dR_p, W, n);
    rows.store(dM, W);
    rows.load(dS, W);
    rows.scale(A);
    rows.add(c.q_rows + i, 1, 2 * Kp, do_p, W, n);
    rows.add(c.p_rows + i, 1, 2 * Kp, dR_p, W, n);
    rows.store(dS, W);
  }

  // C each: by A_t and b_t through q_t, by A_{t-1} and b_{t-1} through p_t, by G_nj, by D_nj.
  Scalar* dA_q() const { return by_token; }
  Scalar* db_q() const { return by_token + C; }
  Scalar* dA_p() const { return by_token + 2 * C; }
  Scalar* db_p() const { return by_token + 3 * C; }
  Scalar* dG_n() const { return by_token + 4 * C; }
  Scalar* dD_n() const { return by_token + 5 * C; }

  template <class T>
  struct Rows {
    const T* rows;
    Index stride;
    const T* data() const { return rows; }
    Index outerStride() const { return stride; }
  };
  template <class T>
  Rows(const T*, Index) -> Rows<T>;

  Index K, V, panels;
  Chunk<Scalar> c;
  Index Kp, C;                   // as in c
  Scalar *states_, *gradients_;  // a State for each chunk of an interval, for each head of the group
  Scalar *u, *do_, *dR;          // C x W for each panel
  Scalar *uT, *doT, *dRT;        // W x C for each panel
  Scalar *X, *Y;                 // C x C
  Scalar *dqT, *dpT, *dktT;      // Kp x C
  Scalar *dq, *dp, *dkt;         // C x Kp
  Scalar* by_token;
  typename DecayMask<Scalar>::Gradients dmask;
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
