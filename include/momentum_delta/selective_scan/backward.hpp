/// \file
/// Gradients of the selective scan, chunk by chunk from the last one. Within a chunk the states are rebuilt
/// from the one before it (the recurrence is never inverted), a few of the N at a time so that those of all
/// its tokens stay in cache; then, with g the gradient by h_t, the tokens pass in reverse:
///
///     out_t = y_t silu(z_t)             dy_t = dout_t silu(z_t),  dz_t = dout_t y_t silu'(z_t)
///     y_t = sum_n C_t,n h_t,n + D u_t   g_n += C_t,n dy_t,  dC_t,n += h_t,n dy_t,  dD += dy_t u_t
///     h_n = a_n h_n + x_t B_t,n         dB_t,n += g_n x_t,  dx_t = sum_n g_n B_t,n,  w_n = g_n a_n h_{t-1},n
///     a_n = exp(dt_t A_n)               ddt_t = sum_n w_n A_n,  dA_n += w_n dt_t,  then g_n *= a_n
///     x_t = dt_t u_t                    du_t = dt_t dx_t + D dy_t,  ddt_t += u_t dx_t
///     dt_t = softplus(delta_t + bias)   ddelta_t = ddt_t sigmoid(delta_t + bias),  dbias += ddelta_t
///
/// dB and dC are sums over the channels of a group, dA, dD and dbias over the sequences. Every panel of
/// channels sums its own, for a stretch of chunks; those are then added in order, so that the threads change
/// no bit.
///
/// Where A counts as another number, -inf and what is below lowest_rate, the decay is a constant: that state
/// gives nothing to ddt, and 0 to dA.
#pragma once

#include <limits>

#include "momentum_delta/selective_scan/saved.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// Sums over the lanes of W rows, that of row i in lane i.
template <class Scalar>
Row<Scalar> lane_sums(const Scalar* rows) {
  constexpr int W = panel_width<Scalar>;
  alignas(64) Scalar columns[W * W];
  transpose(rows, W, W, W, columns, W);
  Row<Scalar> even = Row<Scalar>::Zero(), odd = Row<Scalar>::Zero();
  for (int i = 0; i + 1 < W; i += 2) {
    even += aligned_row(columns + i * W);
    odd += aligned_row(columns + (i + 1) * W);
  }
  return even + odd;
}

// What each panel of channels has for itself between the phases of a backward pass.
template <class Scalar>
struct ScanSums {
  Index state, tokens;  // sizes: Np W, and tokens of a stretch, padded to W
  Scalar *g, *dA;       // state
  Scalar *dD, *dbias;   // W
  Scalar *dB, *dC;      // Np x tokens, sums over the panel's channels; null: not wanted

  ScanSums(Arena& arena, const ScanSizes& s, Index stretch, bool dB_dC)
      : state(padded_states(s.N) * panel_width<Scalar>), tokens(round_up(stretch, panel_width<Scalar>)) {
    const Index panels = s.B * ScanPanels<Scalar>(s).count();
    g = arena.take<Scalar>(panels * state);
    dA = arena.take<Scalar>(panels * state);
    dD = arena.take<Scalar>(panels * panel_width<Scalar>);
    dbias = arena.take<Scalar>(panels * panel_width<Scalar>);
    const Index of_tokens = dB_dC ? panels * padded_states(s.N) * tokens : 0;
    dB = arena.take<Scalar>(of_tokens);
    dC = arena.take<Scalar>(of_tokens);
    if (!dB_dC) dB = dC = nullptr;
  }

  ScanSums of(Index panel) const {
    constexpr Index W = panel_width<Scalar>;
    ScanSums p = *this;
    p.g += panel * state;
    p.dA += panel * state;
    p.dD += panel * W;
    p.dbias += panel * W;
    if (dB) {
      p.dB += panel * (state / W) * tokens;
      p.dC += panel * (state / W) * tokens;
    }
    return p;
  }
};

template <class Scalar, class Storage>
class ScanBackward {
 public:
  ScanBackward(Arena& arena, const ScanSizes& s, Index chunk_size)
      : tokens_(arena, s, chunk_size),
        padded_(round_up(chunk_size, W)),
        A_(arena.take<Scalar>(tokens_.Np() * W)),
        dy_(take_rows<Scalar>(arena, chunk_size)),
        y_(take_rows<Scalar>(arena, chunk_size)),
        dx_(take_rows<Scalar>(arena, chunk_size)),
        ddt_(take_rows<Scalar>(arena, chunk_size)),
        a_(take_rows<Scalar>(arena, together * chunk_size)),
        h_(take_rows<Scalar>(arena, together * (chunk_size + 1))),
        g_x_(take_rows<Scalar>(arena, together * padded_)),
        h_dy_(take_rows<Scalar>(arena, together * padded_)) {}

  void open(const ScanInputs<Scalar, Storage>& x, Index b, const Channels& c) {
    tokens_.open(x, b, c);
    std::fill_n(A_, tokens_.Np() * W, Scalar(0));
    for (Index i = 0; i < c.width; ++i) {
      for (Index n = 0; n < tokens_.N(); ++n) {
        const Scalar A = tokens_.A(n, i);
        A_[n * W + i] = A < lowest_rate<Scalar> ? Scalar(0) : A;
      }
    }
  }

  // Tokens [t0, t0 + n) of batch b, one chunk; before: the state before it, Np x W. sums.g: the gradient by
  // the state after it becomes that by the state before it. Its tokens start at `first` in sums.dB and
  // sums.dC.
  void operator()(Index b, Index t0, Index n, const Scalar* before, Index first, const ScanSums<Scalar>& sums,
                  const ScanOutputGradients<Scalar, Storage>& dy,
                  const ScanInputGradients<Scalar, Storage>& dx) {
    tokens_.load(t0, n);
    const Channels& c = tokens_.channels();
    for (Index i = 0; i < n; ++i) {
      tokens_.fetch(tokens_.inputs().z, t0 + i);
      tokens_.fetch(dy.dout, t0 + i);
      Row<Scalar> dy_i = upstream(dy, b, t0 + i);
      if (tokens_.has_z()) {
        const Row<Scalar> z = tokens_.z(t0 + i);
        dy_i *= z * sigmoid_row<Scalar>(z);
      }
      aligned_row(dy_ + i * W) = dy_i;
    }
    for (Scalar* rows : {y_, dx_, ddt_}) std::fill_n(rows, n * W, Scalar(0));
    const bool wants_y = !dx.dz.absent();
    for (Index s = 0; s < tokens_.Np(); s += together) {
      if (wants_y)
        rebuild<true>(n, s, before);
      else
        rebuild<false>(n, s, before);
      reverse(n, s, sums);
      if (sums.dB) sum_channels(n, s, first, sums);
    }

    Row<Scalar> dD = aligned_row(sums.dD), dbias = aligned_row(sums.dbias);
    const auto put = [&](const ArrayView<Storage, 3>& to, Index t, const Row<Scalar>& row) {
      if (!to.absent()) put_row(row, to.row(b, t) + c.first, c.width, dx.accumulate);
    };
    for (Index i = n; i-- > 0;) {
      const Index t = t0 + i;
      const Row<Scalar> u = tokens_.u(t), dy_i = aligned_row(dy_ + i * W), dx_i = aligned_row(dx_ + i * W);
      Row<Scalar> ddelta = aligned_row(ddt_ + i * W) + u * dx_i;
      if (tokens_.softplus()) ddelta *= sigmoid_row<Scalar>(tokens_.delta(t));
      dD += dy_i * u;
      dbias += ddelta;
      put(dx.du, t, aligned_row(tokens_.dt() + i * W) * dx_i + tokens_.D() * dy_i);
      put(dx.ddelta, t, ddelta);
      if (!wants_y) continue;
      const Row<Scalar> z = tokens_.z(t), sigmoid = sigmoid_row<Scalar>(z);
      put(dx.dz, t,
          upstream(dy, b, t) * tokens_.y(t, aligned_row(y_ + i * W)) * sigmoid *
              (Scalar(1) + z * (Scalar(1) - sigmoid)));
    }
    aligned_row(sums.dD) = dD;
    aligned_row(sums.dbias) = dbias;
  }

 private:
  static constexpr int W = panel_width<Scalar>;
  static constexpr int together = 2;  // states
  static_assert(states_together % together == 0);

  Row<Scalar> upstream(const ScanOutputGradients<Scalar, Storage>& dy, Index b, Index t) const {
    const Channels& c = tokens_.channels();
    return dy.dout.absent() ? Row<Scalar>(Row<Scalar>::Zero())
                            : load_row<Scalar>(dy.dout.row(b, t) + c.first, c.width);
  }

  // a_t, h_t and, if wanted, y_t of the states [s, s + together).
  template <bool WantsY>
  EIGEN_DONT_INLINE void rebuild(Index n, Index s, const Scalar* before) {
    const Index stride = tokens_.stride();
    const Scalar *dt = tokens_.dt(), *x = tokens_.x(), *B = tokens_.B() + s, *C = tokens_.C() + s;
    Scalar *const a = a_, *const h = h_, *const ys = y_;
    Row<Scalar> rate[together], h_i[together];
    unroll<together>([&](auto j) MOMENTUM_DELTA_INLINE {
      rate[j] = aligned_row(tokens_.rate() + (s + j) * W);
      h_i[j] = aligned_row(before + (s + j) * W);
      aligned_row(h + j * W) = h_i[j];
    });
    for (Index i = 0; i < n; ++i) {
      const Row<Scalar> dt_i = aligned_row(dt + i * W), x_i = aligned_row(x + i * W);
      Row<Scalar> y;
      if constexpr (WantsY) y = aligned_row(ys + i * W);
      unroll<together>([&](auto j) MOMENTUM_DELTA_INLINE {
        const Row<Scalar> a_i = decay_row<Scalar>(dt_i, rate[j]);
        h_i[j] = a_i * h_i[j] + x_i * B[i * stride + j];
        aligned_row(a + (i * together + j) * W) = a_i;
        aligned_row(h + ((i + 1) * together + j) * W) = h_i[j];
        if constexpr (WantsY) y += h_i[j] * C[i * stride + j];
      });
      if constexpr (WantsY) aligned_row(ys + i * W) = y;
    }
  }

  EIGEN_DONT_INLINE void reverse(Index n, Index s, const ScanSums<Scalar>& sums) {
    const Index stride = tokens_.stride();
    const Scalar *dt = tokens_.dt(), *x = tokens_.x(), *B = tokens_.B() + s, *C = tokens_.C() + s;
    const Scalar *const a = a_, *const h = h_, *const dys = dy_;
    Scalar *const dxs = dx_, *const ddts = ddt_, *const g_x = g_x_, *const h_dy = h_dy_;
    const Index padded = padded_;
    Row<Scalar> A[together], g[together], dA[together];
    unroll<together>([&](auto j) MOMENTUM_DELTA_INLINE {
      A[j] = aligned_row(A_ + (s + j) * W);
      g[j] = aligned_row(sums.g + (s + j) * W);
      dA[j] = aligned_row(sums.dA + (s + j) * W);
    });
    for (Index i = n; i-- > 0;) {
      const Row<Scalar> dt_i = aligned_row(dt + i * W), x_i = aligned_row(x + i * W),
                        dy_i = aligned_row(dys + i * W);
      Row<Scalar> dx = aligned_row(dxs + i * W), ddt = aligned_row(ddts + i * W);
      unroll<together>([&](auto j) MOMENTUM_DELTA_INLINE {
        g[j] += dy_i * C[i * stride + j];
        aligned_row(h_dy + (j * padded + i) * W) = aligned_row(h + ((i + 1) * together + j) * W) * dy_i;
        aligned_row(g_x + (j * padded + i) * W) = g[j] * x_i;
        dx += g[j] * B[i * stride + j];
        g[j] *= aligned_row(a + (i * together + j) * W);
        const Row<Scalar> w = g[j] * aligned_row(h + (i * together + j) * W);
        ddt += w * A[j];
        dA[j] += w * dt_i;
      });
      aligned_row(dxs + i * W) = dx;
      aligned_row(ddts + i * W) = ddt;
    }
    unroll<together>([&](auto j) MOMENTUM_DELTA_INLINE {
      aligned_row(sums.g + (s + j) * W) = g[j];
      aligned_row(sums.dA + (s + j) * W) = dA[j];
    });
  }

  // dB and dC of the states [s, s + together), which reverse() has left as products a channel.
  EIGEN_DONT_INLINE void sum_channels(Index n, Index s, Index first, const ScanSums<Scalar>& sums) const {
    for (int j = 0; j < together; ++j) {
      const auto sum = [&](Scalar* rows, Scalar* to) {
        rows += j * padded_ * W;
        to += (s + j) * sums.tokens + first;
        std::fill_n(rows + n * W, (round_up(n, W) - n) * W, Scalar(0));
        for (Index i = 0; i < n; i += W)
          store_row(lane_sums(rows + i * W), to + i, std::min<Index>(W, n - i));
      };
      sum(g_x_, sums.dB);
      sum(h_dy_, sums.dC);
    }
  }

  ScanTokens<Scalar, Storage> tokens_;
  Index padded_;                  // chunk_size, to whole rows
  Scalar* A_;                     // Np x W, 0 for -inf
  Scalar *dy_, *y_, *dx_, *ddt_;  // chunk_size x W
  Scalar *a_, *h_;                // chunk_size x together x W, and one token more of h
  Scalar *g_x_, *h_dy_;           // together x padded_ x W
};

// dB or dC of a stretch: adds the panels' sums in order, a tile of W tokens at a time.
template <class Scalar, class Storage>
class ScanGroupSums {
 public:
  ScanGroupSums(Arena& arena, const ScanSizes& s)
      : Np_(padded_states(s.N)), tile_(arena.take<Scalar>(Np_ * W)), row_(arena.take<Scalar>(Np_)) {}

  // panel_sums: of the group's first panel, tokens [i, i + n) of the stretch; to(k): row of token i + k.
  template <class To>
  void operator()(const Scalar* panel_sums, Index panels, Index tokens, Index i, Index n, Index N,
                  const To& to, bool add) {
    for (Index state = 0; state < N; ++state) {
      Row<Scalar> sum = Row<Scalar>::Zero();
      for (Index p = 0; p < panels; ++p)
        sum += load_row<Scalar>(panel_sums + (p * Np_ + state) * tokens + i, n);
      aligned_row(tile_ + state * W) = sum;
    }
    for (Index k = 0; k < n; ++k) {
      for (Index state = 0; state < N; ++state) row_[state] = tile_[state * W + k];
      for (Index state = 0; state < N; state += W) {
        const Index width = std::min<Index>(W, N - state);
        put_row<Storage, Scalar>(load_row<Scalar>(row_ + state, width), to(k) + state, width, add);
      }
    }
  }

 private:
  static constexpr Index W = panel_width<Scalar>;
  Index Np_;
  Scalar* tile_;  // Np x W
  Scalar* row_;   // Np
};

template <class Scalar, class Storage>
void scan_gradients(const ScanInputs<Scalar, Storage>& x, const ChunkStates<Scalar>& states, Index chunk_size,
                    const ScanOutputGradients<Scalar, Storage>& dy,
                    const ScanInputGradients<Scalar, Storage>& dx, const ScanOptions& options) {
  constexpr Index W = panel_width<Scalar>;
  const ScanSizes s = sizes_of(x);
  const ScanPanels<Scalar> panels(s);
  const Index tasks = s.B * panels.count(), chunks = chunks_of(s.T, chunk_size);
  // Enough chunks at a time that threads seldom wait for each other.
  const Index together = std::max<Index>(1, 128 / chunk_size), stretch = together * chunk_size;
  const Index tiles = round_up(stretch, W) / W;
  struct Kernel {
    ScanBackward<Scalar, Storage> backward;
    ScanGroupSums<Scalar, Storage> group;
  };
  run_scan(
      options,
      [&](Arena& arena) { return ScanSums<Scalar>(arena, s, stretch, !dx.dB.absent() || !dx.dC.absent()); },
      [&](Arena& arena) {
        return Kernel{ScanBackward<Scalar, Storage>(arena, s, chunk_size),
                      ScanGroupSums<Scalar, Storage>(arena, s)};
      },
      [&](const ScanSums<Scalar>& all, const auto& run) {
        run(tasks, [&](Kernel&, Index task) {
          const ScanSums<Scalar> sums = all.of(task);
          read_states(dy.dfinal_state, task / panels.count(), panels[task % panels.count()], s.N, sums.g);
          std::fill_n(sums.dA, sums.state, Scalar(0));
          std::fill_n(sums.dD, W, Scalar(0));
          std::fill_n(sums.dbias, W, Scalar(0));
        });
        for (Index last = chunks; last > 0;) {  // the chunks before it are still to do
          const Index begin = (last - 1) / together * together, t0 = begin * chunk_size;
          run(tasks, [&](Kernel& kernel, Index task) {
            const Index b = task / panels.count();
            kernel.backward.open(x, b, panels[task % panels.count()]);
            for (Index c = last; c-- > begin;) {
              const Index t = c * chunk_size;
              kernel.backward(b, t, std::min(chunk_size, s.T - t), states.at(task, c), t - t0, all.of(task),
                              dy, dx);
            }
          });
          const Index n = std::min(stretch, s.T - t0);
          const auto add_panels = [&](const Scalar* sums, const TokenView<Storage>& to) {
            if (to.empty()) return;
            run(s.B * s.G * tiles, [&](Kernel& kernel, Index i) {
              const Index b = i / tiles / s.G, group = i / tiles % s.G, from = i % tiles * W;
              if (from >= n) return;
              const Index first = b * panels.count() + group * panels.of_group();
              kernel.group(
                  sums + first * padded_states(s.N) * all.tokens, panels.of_group(), all.tokens, from,
                  std::min(W, n - from), s.N,
                  [&](Index k) {
                    return to.data + b * to.stride[0] + (t0 + from + k) * to.stride[1] + group * to.stride[2];
                  },
                  dx.accumulate);
            });
          };
          add_panels(all.dB, dx.dB);
          add_panels(all.dC, dx.dC);
          last = begin;
        }
        run(panels.count(), [&](Kernel&, Index panel) {
          const Channels c = panels[panel];
          const ScanSums<Scalar> first = all.of(panel);
          for (Index b = 0; b < s.B; ++b) {
            const ScanSums<Scalar> sums = all.of(b * panels.count() + panel);
            if (!dx.dinitial_state.empty())
              write_states(
                  sums.g, c, s.N, [&](Index d) { return dx.dinitial_state.row(b, d); }, dx.accumulate);
            if (b == 0) continue;
            for (Index i = 0; i < sums.state; i += W) aligned_row(first.dA + i) += aligned_row(sums.dA + i);
            aligned_row(first.dD) += aligned_row(sums.dD);
            aligned_row(first.dbias) += aligned_row(sums.dbias);
          }
          const auto put = [&](const ArrayView<Scalar, 1>& to, const Scalar* sums) {
            const Row<Scalar> row =
                s.B == 0 ? Row<Scalar>(Row<Scalar>::Zero()) : Row<Scalar>(aligned_row(sums));
            if (!to.absent()) put_row(row, to.data + c.first, c.width, dx.accumulate);
          };
          put(dx.dD, first.dD);
          put(dx.ddelta_bias, first.dbias);
          if (dx.dA.empty()) return;
          if (s.B > 0)
            write_states(
                first.dA, c, s.N, [&](Index d) { return dx.dA.row(d); }, dx.accumulate);
          else if (!dx.accumulate)
            for (Index i = 0; i < c.width; ++i) std::fill_n(dx.dA.row(c.first + i), s.N, Scalar(0));
        });
      });
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
