/// \file
/// The momentum delta rule, a chunk of n tokens at a time. With the decay mask (decay_mask.hpp), kt = eta k,
/// and S_0, M_0 the state before the chunk, unrolling the recurrence over the chunk gives
///
///     N = [p_t . kt_j G_{t-1,j}]_{j<t}                          strictly lower
///     (I + N) u = v - A_{t-1} (p S_0) + b_{t-1} (p M_0)         unit lower triangular, solved for u
///     Q = [q_t . kt_j G_tj]_{j<=t}                              lower
///     o   = A_t (q S_0) - b_t (q M_0) + Q u
///     S_n = A_n S_0 - b_n M_0 + (kt .* G_n)^T u
///     M_n = m_n M_0 - (kt .* D_n)^T u
///
/// with q already scaled. Token t of the formulas is row t - 1 here. A later token never meets an earlier
/// output, not even multiplied by 0: the loops end at the diagonal, so a NaN in the future cannot leak into
/// the past.
///
/// Rounding. The mask is exact to rounding for gates <= 0, but u is a difference of what v, S_0 and the
/// earlier u of the chunk contribute: its error is relative to the largest of them, until the chunk ends.
/// Where a key overwrites a value that was 1e4 times larger, what follows in that chunk has up to 1e4 times
/// the rounding error of the recurrence, which corrects itself at every token. Smaller chunks shorten this;
/// chunks of one token are the recurrence. A product of decays inside a chunk is 0 below the smallest normal
/// number; positive log gates must not sum to more than the range of exp (88 in float) inside a chunk.
#pragma once

#include <algorithm>

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/fetch.hpp"
#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/detail/tile.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// One chunk's intermediates and the passes over them. Matrices of n tokens or K channels are padded to whole
// tiles and panels: the rows and columns past n and K are 0, or are never read.
//
// The state's decay is a factor of the rows that read and write it:
//   pA, pb = -A_{t-1} p, b_{t-1} p;  qA, qb = A_t q, -b_t q;  kG, kD = G_n .* kt, -D_n .* kt
// Two layouts of such a pair (a, b), of C x 2 Kp each:
//   rows:   (a_t | b_t), token by token
//   tiles:  tokens in groups of R; for each channel the group's R of a, then its R of b
template <class Scalar>
struct Chunk {
  static constexpr int W = panel_width<Scalar>;
  static constexpr int R = tile_rows;
  using Lanes = Row<Scalar>;
  static constexpr Index padded(Index size) { return detail::padded<Scalar>(size); }

  Index K, Kp, C;  // channels; padded; tokens of the longest chunk, padded
  DecayMask<Scalar> mask;
  Scalar *q, *p, *k, *kt;              // C x Kp; q scaled
  Scalar *qT, *pT, *kT;                // Kp x C: q, p, kt transposed
  Scalar *pk, *qk, *N, *Q;             // C x C
  Scalar *p_tiles, *q_tiles, *k_rows;  // what the forward pass reads
  Scalar *p_rows, *q_rows, *k_tiles;   // what the backward pass reads

  Chunk(Arena& arena, Index chunk_size, Index K_)
      : K(K_),
        Kp(padded(K_)),
        C(padded(chunk_size)),
        mask(arena, chunk_size),
        q(arena.take<Scalar>(C * Kp)),
        p(arena.take<Scalar>(C * Kp)),
        k(arena.take<Scalar>(C * Kp)),
        kt(arena.take<Scalar>(C * Kp)),
        qT(arena.take<Scalar>(Kp * C)),
        pT(arena.take<Scalar>(Kp * C)),
        kT(arena.take<Scalar>(Kp * C)),
        pk(arena.take<Scalar>(C * C)),
        qk(arena.take<Scalar>(C * C)),
        N(arena.take<Scalar>(C * C)),
        Q(arena.take<Scalar>(C * C)),
        p_tiles(arena.take<Scalar>(C * 2 * Kp)),
        q_tiles(arena.take<Scalar>(C * 2 * Kp)),
        k_rows(arena.take<Scalar>(C * 2 * Kp)),
        p_rows(arena.take<Scalar>(C * 2 * Kp)),
        q_rows(arena.take<Scalar>(C * 2 * Kp)),
        k_tiles(arena.take<Scalar>(C * 2 * Kp)) {}

  // Everything before p_tiles, for the tokens [t0, t0 + n).
  template <class Storage>
  void load(const Head<Scalar, Storage>& x, Index t0, Index n) {
    mask.build(
        n, [&](Index i) { return x.log_alpha[t0 + i]; }, [&](Index i) { return x.log_mu[t0 + i]; },
        [&](Index i) { return x.beta[t0 + i]; });
    for (Index c = 0; c < Kp; c += W) {
      const Index width = std::clamp<Index>(K - c, 0, W);
      const auto channels = [&](const RowsMap<const Storage>& rows, Index i) {
        return load_row<Scalar>(rows.data() + (t0 + i) * rows.outerStride() + c, width);
      };
      for (Index i = 0; i < n; ++i) {
        const Lanes k_i = channels(x.k, i);
        aligned_row(q + i * Kp + c) = x.scale * channels(x.q, i);
        aligned_row(p + i * Kp + c) = channels(x.p, i);
        aligned_row(k + i * Kp + c) = k_i;
        aligned_row(kt + i * Kp + c) = x.eta[t0 + i] * k_i;
      }
    }
    for (Scalar* const rows : {q, p, k, kt}) std::fill(rows + n * Kp, rows + padded(n) * Kp, Scalar(0));
    transpose(q, Kp, padded(n), Kp, qT, C);
    transpose(p, Kp, padded(n), Kp, pT, C);
    transpose(kt, Kp, padded(n), Kp, kT, C);
    for (Index i = 0; i < n; i += R) by_panels(i + R, W, [&](auto P, Index j) { form_tile<P>(i, j, n); });
  }

  void form_p_tiles(Index n) {
    form_tiles(n, pT, mask.A_from(0), Scalar(-1), mask.b_from(0), Scalar(1), p_tiles);
  }
  void form_q_tiles(Index n) {
    form_tiles(n, qT, mask.A_from(1), Scalar(1), mask.b_from(1), Scalar(-1), q_tiles);
  }
  void form_k_tiles(Index n) { form_tiles(n, kT, mask.G(n), Scalar(1), mask.D(n), Scalar(-1), k_tiles); }
  void form_p_rows(Index n) {
    form_rows(n, p, mask.A_from(0), Scalar(-1), mask.b_from(0), Scalar(1), p_rows);
  }
  void form_q_rows(Index n) {
    form_rows(n, q, mask.A_from(1), Scalar(1), mask.b_from(1), Scalar(-1), q_rows);
  }
  void form_k_rows(Index n) { form_rows(n, kt, mask.G(n), Scalar(1), mask.D(n), Scalar(-1), k_rows); }

  // Panels of V: v, u and o have C x W each, S and M Kp x W. After each tile between() is called.
  using Panels = PanelRows<Scalar>;
  using ConstPanels = PanelRows<const Scalar>;

  // (I + N) u = v - A_{t-1} (p S_0) + b_{t-1} (p M_0), for P panels. u: in, v; out, u. Reads p_tiles.
  template <int P, class Between>
  void solve_u(Index n, const ConstPanels& S, const ConstPanels& M, const Panels& u,
               const Between& between) const {
    for (Index i = 0; i < n; i += R) solve_tile<P>(i, S, M, u), between();
  }

  // o = A_t (q S_0) - b_t (q M_0) + Q u, for P panels. Reads q_tiles.
  template <int P, class Between>
  void read_o(Index n, const ConstPanels& S, const ConstPanels& M, const ConstPanels& u, const Panels& o,
              const Between& between) const {
    for (Index i = 0; i < n; i += R) read_tile<P>(i, S, M, u, o), between();
  }

  // S_n = A_n S_0 - b_n M_0 + (kt .* G_n)^T u and M_n = m_n M_0 - (kt .* D_n)^T u, for P panels. Reads k_rows.
  template <int P, class Between>
  void carry(Index n, const ConstPanels& u, const Panels& S, const Panels& M, const Between& between) const {
    for (Index c = 0; c < K; c += R) carry_tile<P>(c, n, u, S, M), between();
  }

  // f(r, panel) for all rows of a tile.
  template <int P, class F>
  static EIGEN_ALWAYS_INLINE void each_row(const F& f) {
    unroll<P>([&](auto panel)
                  MOMENTUM_DELTA_INLINE { unroll<R>([&](auto r) MOMENTUM_DELTA_INLINE { f(r, panel); }); });
  }

 private:
  // a_sign a_t x_t and b_sign b_t x_t of every token t: as tiles, from x transposed (Kp x C) ..
  void form_tiles(Index n, const Scalar* xT, const Scalar* a, Scalar a_sign, const Scalar* b, Scalar b_sign,
                  Scalar* tiles) const {
    constexpr int part = std::min(W, R);  // tokens that lie together in both layouts
    using Part = Numbers<Scalar, part>;
    for (Index t = 0; t < round_up(n, R); t += part) {
      Part a_t = Part::Zero(), b_t = Part::Zero();  // past n, where a tile is larger than a part
      if (t < n) {
        a_t = a_sign * Eigen::Map<const Part>(a + t);
        b_t = b_sign * Eigen::Map<const Part>(b + t);
      }
      Scalar* const to = tiles + t / R * R * 2 * Kp + t % R;
      for (Index c = 0; c < K; ++c) {
        const Part x = Eigen::Map<const Part>(xT + c * C + t);
        Eigen::Map<Part>(to + c * 2 * R) = a_t * x;
        Eigen::Map<Part>(to + c * 2 * R + R) = b_t * x;
      }
    }
  }
  // .. and as rows, from x (C x Kp).
  void form_rows(Index n, const Scalar* x, const Scalar* a, Scalar a_sign, const Scalar* b, Scalar b_sign,
                 Scalar* rows) const {
    for (Index t = 0; t < n; ++t) {
      for (Index c = 0; c < Kp; c += W) {
        const Lanes x_t = aligned_row(x + t * Kp + c);
        aligned_row(rows + t * 2 * Kp + c) = a_sign * a[t] * x_t;
        aligned_row(rows + t * 2 * Kp + Kp + c) = b_sign * b[t] * x_t;
      }
    }
  }

  // Rows [i, i + R) and columns [first, first + P W) of pk, qk, and of N and Q, from the mask.
  template <int P>
  EIGEN_DONT_INLINE void form_tile(Index i, Index first, Index n) {
    Tile<Scalar, P> products;
    products.set_zero();
    products.add(p + i * Kp, Kp, 1, ConstPanels(kT + first, W), C, K);
    products.store(Panels(pk + i * C + first, W), C);
    each_row<P>([&](auto r, auto panel) MOMENTUM_DELTA_INLINE {  // row t = i + r + 1 reads G_{t-1}
      const Index j = first + panel * W;
      const bool some = i + r < n && j < i + r;
      aligned_row(N + (i + r) * C + j) =
          some ? Lanes(products.row(r, panel) * aligned_row(mask.G(i + r) + j)) : Lanes(Lanes::Zero());
    });
    products.set_zero();
    products.add(q + i * Kp, Kp, 1, ConstPanels(kT + first, W), C, K);
    products.store(Panels(qk + i * C + first, W), C);
    each_row<P>([&](auto r, auto panel) MOMENTUM_DELTA_INLINE {
      const Index j = first + panel * W;
      const bool some = i + r < n && j <= i + r;
      aligned_row(Q + (i + r) * C + j) =
          some ? Lanes(products.row(r, panel) * aligned_row(mask.G(i + r + 1) + j)) : Lanes(Lanes::Zero());
    });
  }

  template <int P>
  EIGEN_DONT_INLINE void solve_tile(Index i, ConstPanels S, ConstPanels M, Panels u) const {
    Tile<Scalar, P> rows;
    rows.load(u + i * W, W);
    rows.add_both(p_tiles + i * 2 * Kp, S, M, K);
    rows.subtract(N + i * C, C, 1, u, W, i);
    rows.solve_unit_lower(N + i * C + i, C);
    rows.store(u + i * W, W);
  }

  template <int P>
  EIGEN_DONT_INLINE void read_tile(Index i, ConstPanels S, ConstPanels M, ConstPanels u, Panels o) const {
    Tile<Scalar, P> rows;
    rows.set_zero();
    rows.add_both(q_tiles + i * 2 * Kp, S, M, K);
    rows.add(Q + i * C, C, 1, u, W, i);
    rows.add_lower(Q + i * C + i, C, u + i * W, W);
    rows.store(o + i * W, W);
  }

  template <int P>
  EIGEN_DONT_INLINE void carry_tile(Index c, Index n, ConstPanels u, Panels S, Panels M) const {
    const Scalar A = mask.A(n), b = mask.b(n), m = mask.m(n);
    Tile<Scalar, P> rows;
    rows.load(S + c * W, W);
    rows.scale(A);
    rows.add_scaled(-b, M + c * W, W);
    rows.add(k_rows + c, 1, 2 * Kp, u, W, n);
    rows.store(S + c * W, W);
    rows.load(M + c * W, W);
    rows.scale(m);
    rows.add(k_rows + Kp + c, 1, 2 * Kp, u, W, n);
    rows.store(M + c * W, W);
  }
};

template <class Scalar, class Storage>
class ChunkForward {
 public:
  // Room for `columns` columns of a head's V.
  ChunkForward(Arena& arena, const Sizes& s, Index columns, Index chunk_size)
      : chunk_size_(chunk_size),
        c_(arena, chunk_size, s.K),
        S_(arena.take<Scalar>(c_.Kp * round_up(columns, W))),
        M_(arena.take<Scalar>(c_.Kp * round_up(columns, W))),
        u_(arena.take<Scalar>(panels_together * c_.C * W)),
        o_(arena.take<Scalar>(panels_together * c_.C * W)) {}

  // Columns [begin, end) of V, from the state `first` (absent: 0) to the state `last` (absent: not wanted).
  // o: T x V, assigned. record: see saved.hpp.
  void operator()(const Head<Scalar, Storage>& x, Index begin, Index end,
                  const StatePair<const Scalar>& first, RowsMap<Storage> o, const StatePair<Scalar>& last,
                  const Record<Scalar>& record) {
    const Index panel = c_.Kp * W;
    first.S.read(begin, end, x.K(), S_, panel, panel);
    first.M.read(begin, end, x.K(), M_, panel, panel);
    for (Index t0 = 0; t0 < x.T(); t0 += chunk_size_) {
      const Index n = std::min(chunk_size_, x.T() - t0);
      c_.load(x, t0, n);
      c_.form_p_tiles(n);
      c_.form_q_tiles(n);
      c_.form_k_rows(n);
      Fetch<Storage> next;
      for (const auto* rows : {&x.q, &x.k, &x.p}) next.add(*rows, t0 + n, chunk_size_, 0, x.K());
      next.add(x.v, t0 + n, chunk_size_, begin, end - begin);
      next.add(o, t0, n, begin, end - begin);
      const auto fetch = [&] { next.some(); };
      by_panels(end - begin, W, [&](auto P, Index column) {
        const PanelRows<Scalar> S(S_ + column * c_.Kp, panel), M(M_ + column * c_.Kp, panel);
        const PanelRows<Scalar> u(u_, c_.C * W), o_panels(o_, c_.C * W);
        const auto each = [&](const auto& visit) {
          for (Index i = 0; i < P; ++i) {
            const Index at = begin + column + i * W;
            visit(i, at, std::min<Index>(W, end - at));
          }
        };
        each([&](Index i, Index at, Index width) {
          if (record.wants_state(t0))
            record.state(
                t0, at, width,
                [&](Index row) -> Row<Scalar> { return aligned_row(S.data + i * panel + row * W); },
                [&](Index row) -> Row<Scalar> { return aligned_row(M.data + i * panel + row * W); });
          load_rows(x.v, t0, n, at, width, c_.padded(n), u_ + i * c_.C * W);
        });
        c_.template solve_u<P>(n, S, M, u, fetch);
        c_.template read_o<P>(n, S, M, u, o_panels, fetch);
        c_.template carry<P>(n, u, S, M, fetch);
        each([&](Index i, Index at, Index width) {
          for (Index t = 0; t < n; ++t) {
            record.u(t0 + t, at, aligned_row(u_ + (i * c_.C + t) * W).head(width));
            store_row(Row<Scalar>(aligned_row(o_ + (i * c_.C + t) * W)),
                      o.data() + (t0 + t) * o.outerStride() + at, width);
          }
        });
      });
    }
    last.S.write(begin, end, x.K(), S_, panel);
    last.M.write(begin, end, x.K(), M_, panel);
  }

 private:
  static constexpr Index W = panel_width<Scalar>;

  Index chunk_size_;
  Chunk<Scalar> c_;
  Scalar *S_, *M_;  // a Kp x W panel for each W columns
  Scalar *u_, *o_;  // C x W for each of the panels taken together
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
