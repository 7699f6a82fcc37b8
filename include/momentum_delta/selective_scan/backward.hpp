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
/// dB and dC are sums over the channels of a group, dA, dD and dbias over the sequences. Every strip of panels
/// sums its own, for a stretch of chunks; those are then added in order, so that the threads change no bit.
///
/// Where A counts as another number, -inf and what is below lowest_rate, the decay is a constant: that state
/// gives nothing to ddt, and 0 to dA.
#pragma once

#include <limits>

#include "momentum_delta/selective_scan/saved.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// What each panel of channels has for itself between the phases of a backward pass, and each strip.
template <class Scalar>
struct ScanSums {
  Index state, tokens;  // sizes: Np W, and tokens of a stretch, padded to W
  Scalar *g, *dA;       // state
  Scalar *dD, *dbias;   // W
  Scalar *dB, *dC;      // Np x tokens, sums over the strip's channels; null: not wanted

  ScanSums(Arena& arena, const ScanSizes& s, Index stretch, bool dB_dC)
      : state(padded_states(s.N) * panel_width<Scalar>), tokens(round_up(stretch, panel_width<Scalar>)) {
    const Index panels = s.B * ScanPanels<Scalar>(s).count();
    g = arena.take<Scalar>(panels * state);
    dA = arena.take<Scalar>(panels * state);
    dD = arena.take<Scalar>(panels * panel_width<Scalar>);
    dbias = arena.take<Scalar>(panels * panel_width<Scalar>);
    const Index of_tokens = dB_dC ? ScanStrips<Scalar>(s).count() * padded_states(s.N) * tokens : 0;
    dB = arena.take<Scalar>(of_tokens);
    dC = arena.take<Scalar>(of_tokens);
    if (!dB_dC) dB = dC = nullptr;
  }

  // With what a panel has for itself.
  ScanSums of(Index panel) const {
    constexpr Index W = panel_width<Scalar>;
    ScanSums p = *this;
    p.g += panel * state;
    p.dA += panel * state;
    p.dD += panel * W;
    p.dbias += panel * W;
    return p;
  }
  // With what a strip has.
  ScanSums of_strip(Index strip) const {
    const Index size = state / panel_width<Scalar> * tokens;
    ScanSums s = *this;
    if (dB) {
      s.dB += strip * size;
      s.dC += strip * size;
    }
    return s;
  }
};

template <class Scalar, class Storage>
class ScanBackward {
 public:
  // Room for `panels` panels at once.
  ScanBackward(Arena& arena, const ScanSizes& s, Index panels, Index chunk_size)
      : tokens_(arena, s, panels, chunk_size),
        As_(arena.take<Scalar>(panels * tokens_.Np() * W)),
        dy_(take_rows<Scalar>(arena, chunk_size)),
        dz_(take_rows<Scalar>(arena, chunk_size)),
        y_(take_rows<Scalar>(arena, chunk_size)),
        dx_(take_rows<Scalar>(arena, chunk_size)),
        ddt_(take_rows<Scalar>(arena, chunk_size)),
        by_delta_(take_rows<Scalar>(arena, chunk_size)),
        by_z_(take_rows<Scalar>(arena, chunk_size)),
        a_(take_rows<Scalar>(arena, together * chunk_size)),
        h_(take_rows<Scalar>(arena, together * (chunk_size + 1))) {}

  // Panels [first, first + count) of batch b.
  void open(const ScanInputs<Scalar, Storage>& x, Index b, Index first, Index count) {
    tokens_.open(x, b, first, count);
    std::fill_n(As_, count * tokens_.Np() * W, Scalar(0));
    for (Index p = 0; p < count; ++p) {
      const Channels c = tokens_.channels(p);
      for (Index i = 0; i < c.width; ++i) {
        for (Index n = 0; n < tokens_.N(); ++n) {
          const Scalar A = x.A.row(c.first + i)[n];
          As_[(p * tokens_.Np() + n) * W + i] = A < lowest_rate<Scalar> ? Scalar(0) : A;
        }
      }
    }
  }

  // Of all open panels: the tokens [t0, t0 + n), one chunk.
  void load_states(Index t0, Index n) { tokens_.load_states(t0, n); }
  // Of panel p: that chunk. before: the state before it, Np x W. sums.g: the gradient by the state after it
  // becomes that by the state before it. Its tokens start at `first` in sums.dB and sums.dC.
  void operator()(Index p, Index t0, Index n, const Scalar* before, Index first, const ScanSums<Scalar>& sums,
                  const ScanOutputGradients<Scalar, Storage>& dy,
                  const ScanInputGradients<Scalar, Storage>& dx, const FetchRows<Storage>& next) {
    tokens_.select(p);
    tokens_.load(t0, n, by_delta_);
    upstream(t0, n, dy.dout);
    const bool wants_y = !dx.dz.absent();
    if (wants_y) tokens_.skip(n, y_);
    for (Scalar* rows : {dx_, ddt_}) std::fill_n(rows, n * W, Scalar(0));
    for (Index s = 0; s < tokens_.Np(); s += together) {
      if (wants_y)
        rebuild<true>(n, s, before);
      else
        rebuild<false>(n, s, before);
      reverse(n, s, sums, next);
      if (sums.dB) sum_channels(n, s, first, sums);
    }
    through_inputs(n);
    add_tokens(n, sums);
    const auto put = [&](const Scalar* rows, const ArrayView<Storage, 3>& to) {
      if (!to.absent()) put_rows(rows, tokens_.sequence(to), t0, n, tokens_.channels(), dx.accumulate);
    };
    put(dx_, dx.du);
    put(ddt_, dx.ddelta);
    if (!wants_y) return;
    for (Index i = 0; i < n; ++i) aligned_row(dz_ + i * W) *= aligned_row(y_ + i * W);
    put(dz_, dx.dz);
  }

  // What passes panel p for the tokens [t0, t0 + n).
  FetchRows<Storage> rows_of(Index p, Index t0, Index n, const ScanOutputGradients<Scalar, Storage>& dy,
                             const ScanInputGradients<Scalar, Storage>& dx) const {
    const Channels c = tokens_.channels(p);
    FetchRows<Storage> rows;
    const auto add = [&](const auto& array) {
      if (!array.absent()) rows.add(tokens_.sequence(array), t0, n, c.first, c.width);
    };
    add(dx.dz);
    add(dx.ddelta);
    add(dx.du);
    add(tokens_.inputs().z);
    add(dy.dout);
    add(tokens_.inputs().u);
    add(tokens_.inputs().delta);
    return rows;
  }

 private:
  static constexpr int W = panel_width<Scalar>;
  static constexpr int together = 2;  // states
  static_assert(states_together % together == 0);

  // dy, and of dz all but the factor y.
  void upstream(Index t0, Index n, const ArrayView<const Storage, 3>& dout) {
    const Channels c = tokens_.channels();
    Scalar *const dy = dy_, *const dz = dz_, *const sigmoid = by_z_;
    if (dout.absent())
      std::fill_n(dy, n * W, Scalar(0));
    else
      load_rows(tokens_.sequence(dout), t0, n, c.first, c.width, n, dy);
    if (!tokens_.has_z()) return;
    load_rows(tokens_.sequence(tokens_.inputs().z), t0, n, c.first, c.width, n, dz);
    sigmoid_rows(n, dz, sigmoid);
    for (Index i = 0; i < n; ++i) {
      const Row<Scalar> z = aligned_row(dz + i * W), sigmoid_i = aligned_row(sigmoid + i * W);
      const Row<Scalar> dy_sigmoid = aligned_row(dy + i * W) * sigmoid_i;
      aligned_row(dz + i * W) = dy_sigmoid * (Scalar(1) + z * (Scalar(1) - sigmoid_i));
      aligned_row(dy + i * W) = dy_sigmoid * z;
    }
  }

  // From dx and ddt to du and ddelta, in their place.
  void through_inputs(Index n) {
    const Scalar *const dt = tokens_.dt(), *const u = tokens_.u(), *const dy = dy_;
    Scalar *const dx = dx_, *const ddt = ddt_;
    const Row<Scalar> D = tokens_.D();
    for (Index i = 0; i < n; ++i) {
      const Row<Scalar> dx_i = aligned_row(dx + i * W);
      aligned_row(ddt + i * W) += aligned_row(u + i * W) * dx_i;
      aligned_row(dx + i * W) =
          multiply_add<Scalar>(aligned_row(dt + i * W), dx_i, D * aligned_row(dy + i * W));
    }
    if (!tokens_.inputs().delta_softplus) return;
    const Scalar* const sigmoid = by_delta_;
    for (Index i = 0; i < n; ++i) aligned_row(ddt + i * W) *= aligned_row(sigmoid + i * W);
  }

  // What is summed over tokens.
  void add_tokens(Index n, const ScanSums<Scalar>& sums) const {
    const Scalar *const dy = dy_, *const u = tokens_.u(), *const ddelta = ddt_;
    Row<Scalar> dD = aligned_row(sums.dD), dbias = aligned_row(sums.dbias);
    for (Index i = n; i-- > 0;) {
      dD += aligned_row(dy + i * W) * aligned_row(u + i * W);
      dbias += aligned_row(ddelta + i * W);
    }
    aligned_row(sums.dD) = dD;
    aligned_row(sums.dbias) = dbias;
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
        h_i[j] = multiply_add<Scalar>(a_i, h_i[j], x_i * B[i * stride + j]);
        aligned_row(a + (i * together + j) * W) = a_i;
        aligned_row(h + ((i + 1) * together + j) * W) = h_i[j];
        if constexpr (WantsY) y += h_i[j] * C[i * stride + j];
      });
      if constexpr (WantsY) aligned_row(ys + i * W) = y;
    }
  }

  // Of the same states: g by h_t, which takes the place of a_t, and what follows from it but dB and dC.
  EIGEN_DONT_INLINE void reverse(Index n, Index s, const ScanSums<Scalar>& sums,
                                 const FetchRows<Storage>& next) {
    const Index stride = tokens_.stride();
    const Scalar *dt = tokens_.dt(), *B = tokens_.B() + s, *C = tokens_.C() + s;
    const Scalar *const h = h_, *const dys = dy_;
    Scalar *const dxs = dx_, *const ddts = ddt_, *const a = a_;
    const Scalar* const As = As_ + tokens_.selected() * tokens_.Np() * W;
    const Index part = s / together, parts = tokens_.Np() / together;
    const int begin = next.begin(part, parts), end = next.begin(part + 1, parts);
    Row<Scalar> A[together], g[together], dA[together];
    unroll<together>([&](auto j) MOMENTUM_DELTA_INLINE {
      A[j] = aligned_row(As + (s + j) * W);
      g[j] = aligned_row(sums.g + (s + j) * W);
      dA[j] = aligned_row(sums.dA + (s + j) * W);
    });
    for (Index i = n; i-- > 0;) {
      const Row<Scalar> dt_i = aligned_row(dt + i * W), dy_i = aligned_row(dys + i * W);
      Row<Scalar> dx = aligned_row(dxs + i * W), ddt = aligned_row(ddts + i * W);
      next.row(i, begin, end);
      unroll<together>([&](auto j) MOMENTUM_DELTA_INLINE {
        const Row<Scalar> a_i = aligned_row(a + (i * together + j) * W);
        g[j] += dy_i * C[i * stride + j];
        aligned_row(a + (i * together + j) * W) = g[j];
        dx += g[j] * B[i * stride + j];
        g[j] *= a_i;
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

  // dB and dC of the same states, from the g that reverse() has left.
  EIGEN_DONT_INLINE void sum_channels(Index n, Index s, Index first, const ScanSums<Scalar>& sums) const {
    // sums over the channels of left_t .* right_t, the rows of left `together` apart
    const auto sum = [&](const Scalar* left, const Scalar* right, Scalar* to) {
      const auto of_tokens = [&](const auto& token) MOMENTUM_DELTA_INLINE {
        return lane_sums<Scalar>([&](Index k) MOMENTUM_DELTA_INLINE -> Row<Scalar> {
          return aligned_row(left + token(k) * together * W) * aligned_row(right + token(k) * W);
        });
      };
      for (Index t = 0; t < n; t += W) {
        const auto next = [&](Index k) MOMENTUM_DELTA_INLINE { return t + k; };
        const auto next_or_last = [&](Index k) MOMENTUM_DELTA_INLINE { return std::min(t + k, n - 1); };
        put_row(t + W <= n ? of_tokens(next) : of_tokens(next_or_last), to + t, std::min<Index>(W, n - t),
                tokens_.selected() > 0);
      }
    };
    for (int j = 0; j < together; ++j) {
      const Index at = (s + j) * sums.tokens + first;
      sum(a_ + j * W, tokens_.x(), sums.dB + at);
      sum(h_ + (together + j) * W, dy_, sums.dC + at);
    }
  }

  ScanTokens<Scalar, Storage> tokens_;
  Scalar* As_;                          // Np x W for each panel, 0 for -inf
  Scalar *dy_, *dz_, *y_, *dx_, *ddt_;  // chunk_size x W
  Scalar *by_delta_, *by_z_;            // chunk_size x W: sigmoids of delta + bias and of z
  Scalar *a_, *h_;                      // chunk_size x together x W, and one token more of h; a, then g
};

// dB or dC of a stretch: adds the strips' sums in order, a tile of W tokens at a time.
template <class Scalar, class Storage>
class ScanGroupSums {
 public:
  ScanGroupSums(Arena& arena, const ScanSizes& s)
      : Np_(padded_states(s.N)), tile_(arena.take<Scalar>(Np_ * W)), row_(arena.take<Scalar>(Np_)) {}

  // strip_sums: of the group's first strip, tokens [i, i + n) of the stretch; to(k): row of token i + k.
  template <class To>
  void operator()(const Scalar* strip_sums, Index strips, Index tokens, Index i, Index n, Index N,
                  const To& to, bool add) {
    for (Index state = 0; state < N; ++state) {
      Row<Scalar> sum = Row<Scalar>::Zero();
      for (Index p = 0; p < strips; ++p)
        sum += load_row<Scalar>(strip_sums + (p * Np_ + state) * tokens + i, n);
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
  const ScanStrips<Scalar> strips(s);
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
        return Kernel{ScanBackward<Scalar, Storage>(arena, s, strips.together(), chunk_size),
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
          run(strips.count(), [&](Kernel& kernel, Index task) {
            const Strip strip = strips[task];
            const Index first = strip.b * panels.count() + strip.first;
            kernel.backward.open(x, strip.b, strip.first, strip.count);
            for (Index c = last; c-- > begin;) {
              const Index t = c * chunk_size, n = std::min(chunk_size, s.T - t);
              kernel.backward.load_states(t, n);
              for (Index p = 0; p < strip.count; ++p) {
                const FetchRows<Storage> next =
                    p + 1 < strip.count ? kernel.backward.rows_of(p + 1, t, n, dy, dx)
                    : c > begin         ? kernel.backward.rows_of(0, t - chunk_size, chunk_size, dy, dx)
                                        : FetchRows<Storage>();
                kernel.backward(p, t, n, states.at(first + p, c), t - t0, all.of_strip(task).of(first + p),
                                dy, dx, next);
              }
            }
          });
          const Index n = std::min(stretch, s.T - t0);
          const auto add_strips = [&](const Scalar* sums, const TokenView<Storage>& to) {
            if (to.empty()) return;
            run(s.B * s.G * tiles, [&](Kernel& kernel, Index i) {
              const Index b = i / tiles / s.G, group = i / tiles % s.G, from = i % tiles * W;
              if (from >= n) return;
              kernel.group(
                  sums + (b * s.G + group) * strips.of_group() * padded_states(s.N) * all.tokens,
                  strips.of_group(), all.tokens, from, std::min(W, n - from), s.N,
                  [&](Index k) {
                    return to.data + b * to.stride[0] + (t0 + from + k) * to.stride[1] + group * to.stride[2];
                  },
                  dx.accumulate);
            });
          };
          add_strips(all.dB, dx.dB);
          add_strips(all.dC, dx.dC);
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
