/// \file
/// Panels of channels: what every kernel of the selective scan reads. A panel is W channels of one group of
/// one sequence, a cache line of each token's row. Its state has a row of W channels for each of the N
/// states.
#pragma once

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/activation_rows.hpp"
#include "momentum_delta/detail/fetch.hpp"
#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/executor.hpp"
#include "momentum_delta/selective_scan/inputs.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// States that a loop over tokens takes together: enough to hide the latency of one, few enough to stay in
// registers. Panels have a multiple of it; what is added decays by exp(0) = 1, and stays 0.
inline constexpr int states_together = 4;

inline Index padded_states(Index N) {
  return round_up(N, states_together);
}

struct Channels {
  Index group, first, width;
};

// How the channels of a sequence are cut into panels.
template <class Scalar>
class ScanPanels {
 public:
  explicit ScanPanels(const ScanSizes& s)
      : groups_(s.G), channels_(s.D / s.G), panels_(round_up(channels_, W) / W) {}

  Index of_group() const { return panels_; }
  Index count() const { return groups_ * panels_; }
  Channels operator[](Index panel) const {
    const Index group = panel / panels_, within = panel % panels_ * W;
    return {group, group * channels_ + within, std::min(W, channels_ - within)};
  }

 private:
  static constexpr Index W = panel_width<Scalar>;
  Index groups_, channels_, panels_;
};

// Panels [first, first + count) of batch b, of one group.
struct Strip {
  Index b, first, count;
};

// How the panels of all sequences are cut into strips, whose panels a task takes one after the other for each
// block of tokens: their rows share cache lines and pages. A strip has up to eight panels (half a kilobyte of
// a row of floats), fewer where there would be less than 16 strips to share out among threads. (How many
// threads there are does not matter: some sums are added up by strips.)
template <class Scalar>
class ScanStrips {
 public:
  explicit ScanStrips(const ScanSizes& s)
      : groups_(s.G),
        panels_(ScanPanels<Scalar>(s).of_group()),
        together_(std::clamp<Index>(s.B * s.G * panels_ / 16, 1, 8)),
        of_group_(round_up(panels_, together_) / together_),
        count_(s.B * s.G * of_group_) {}

  Index of_group() const { return of_group_; }
  Index together() const { return together_; }  // the most that a strip has
  Index count() const { return count_; }
  Strip operator[](Index strip) const {
    const Index group = strip / of_group_, within = strip % of_group_ * together_;
    return {group / groups_, group % groups_ * panels_ + within, std::min(together_, panels_ - within)};
  }

 private:
  Index groups_, panels_, together_, of_group_, count_;
};

// Memory for n rows, and one more: arrays a multiple of 4096 bytes apart would share a few sets of the cache,
// and drive each other out where a loop reads one row of each.
template <class Scalar>
Scalar* take_rows(Arena& arena, Index n) {
  return arena.take<Scalar>((n + 1) * panel_width<Scalar>);
}

// States of a panel in the caller's memory, [B, D, N], to rows of channels; zeros if absent.
template <class Scalar>
void read_states(const ArrayView<const Scalar, 3>& from, Index b, const Channels& c, Index N, Scalar* panel) {
  constexpr Index W = panel_width<Scalar>;
  std::fill_n(panel, padded_states(N) * W, Scalar(0));
  if (from.empty()) return;
  for (Index i = 0; i < c.width; ++i) {
    const Scalar* const states = from.row(b, c.first + i);
    for (Index n = 0; n < N; ++n) panel[n * W + i] = states[n];
  }
}

// The other way, assigned or added; nothing if absent. `to`: the N states of channel d of those start at
// to(d).
template <class Scalar, class To>
void write_states(const Scalar* panel, const Channels& c, Index N, const To& to, bool add = false) {
  constexpr Index W = panel_width<Scalar>;
  for (Index i = 0; i < c.width; ++i) {
    Scalar* const states = to(c.first + i);
    for (Index n = 0; n < N; ++n) states[n] = (add ? states[n] : Scalar(0)) + panel[n * W + i];
  }
}

// Channels of token rows that hold Storage; assigned or added.
template <class Storage, class Scalar>
EIGEN_ALWAYS_INLINE void put_row(Row<Scalar> row, Storage* to, Index width, bool add) {
  if (add) row += load_row<Scalar>(to, width);
  store_row(row, to, width);
}

// Rows of a panel of channels to the tokens [t0, t0 + n) of a sequence; assigned or added.
template <class Scalar, class Map>
void put_rows(const Scalar* rows, Map to, Index t0, Index n, const Channels& c, bool add = false) {
  constexpr Index W = panel_width<Scalar>;
  auto* const first = to.data() + t0 * to.outerStride() + c.first;
  for (Index i = 0; i < n; ++i)
    put_row(Row<Scalar>(aligned_row(rows + i * W)), first + i * to.outerStride(), c.width, add);
}

// Panels of the inputs, next to each other in one group of one sequence, and of one of them at a time a block
// of tokens in Scalars.
template <class Scalar, class Storage>
class ScanTokens {
 public:
  static constexpr int W = panel_width<Scalar>;

  // Room for `panels` panels, and blocks of up to `block` tokens.
  ScanTokens(Arena& arena, const ScanSizes& s, Index panels, Index block)
      : panels_(s),
        N_(s.N),
        Np_(padded_states(s.N)),
        stride_(round_up(Np_, W)),
        rates_(arena.take<Scalar>(panels * Np_ * W)),
        D_(arena.take<Scalar>(panels * W)),
        bias_(arena.take<Scalar>(panels * W)),
        dt_(take_rows<Scalar>(arena, block)),
        x_(take_rows<Scalar>(arena, block)),
        u_(take_rows<Scalar>(arena, block)),
        B_(arena.take<Scalar>(block * stride_)),
        C_(arena.take<Scalar>(block * stride_)) {}

  // Panels [first, first + count) of batch b.
  void open(const ScanInputs<Scalar, Storage>& inputs, Index b, Index first, Index count) {
    in_ = &inputs;
    b_ = b;
    first_ = first;
    count_ = count;
    std::fill_n(rates_, count * Np_ * W, Scalar(0));
    for (Index p = 0; p < count; ++p) {
      const Channels c = channels(p);
      aligned_row(D_ + p * W) = of_channels(in_->D, c);
      aligned_row(bias_ + p * W) = of_channels(in_->delta_bias, c);
      for (Index i = 0; i < c.width; ++i)
        for (Index n = 0; n < N_; ++n) rates_[(p * Np_ + n) * W + i] = decay_rate(in_->A.row(c.first + i)[n]);
    }
  }

  Index count() const { return count_; }
  // Which of the open panels is meant from now on.
  void select(Index p) { p_ = p; }
  Index selected() const { return p_; }

  // Of all panels: B and C of the tokens [t0, t0 + n).
  void load_states(Index t0, Index n) {
    copy_states(in_->B, t0, n, B_);
    copy_states(in_->C, t0, n, C_);
  }
  // Of the selected one. sigmoids: null, or where to leave ddt / ddelta if dt is a softplus, n x W.
  void load(Index t0, Index n, Scalar* sigmoids = nullptr) {
    const Channels c = channels();
    load_rows(sequence(in_->delta), t0, n, c.first, c.width, n, dt_);
    load_rows(sequence(in_->u), t0, n, c.first, c.width, n, u_);
    Scalar *const dts = dt_, *const xs = x_;
    const Scalar* const us = u_;
    const Row<Scalar> bias = this->bias();
    for (Index i = 0; i < n; ++i) aligned_row(dts + i * W) += bias;
    if (in_->delta_softplus)
      sigmoids ? softplus_rows<true>(n, dts, sigmoids) : softplus_rows<false>(n, dts, xs);
    for (Index i = 0; i < n; ++i)
      aligned_row(xs + i * W) = aligned_row(dts + i * W) * aligned_row(us + i * W);
  }

  const ScanInputs<Scalar, Storage>& inputs() const { return *in_; }
  Index N() const { return N_; }
  Index Np() const { return Np_; }  // rows of a panel's state
  bool has_z() const { return !in_->z.absent(); }
  // An array of tokens, as far as it is of the sequence: T x D.
  template <class Element>
  RowsMap<Element> sequence(const ArrayView<Element, 3>& array) const {
    return {array.row(b_, 0), array.shape[1], array.shape[2], Eigen::OuterStride<>(array.stride[1])};
  }

  // Of the panel
  Channels channels(Index p) const { return panels_[first_ + p]; }
  Channels channels() const { return channels(p_); }
  const Scalar* rate() const { return rates_ + p_ * Np_ * W; }      // Np x W: see decay_rate
  Row<Scalar> D() const { return aligned_row(D_ + p_ * W); }        // 0 if absent
  Row<Scalar> bias() const { return aligned_row(bias_ + p_ * W); }  // the same

  // Of the block
  const Scalar* dt() const { return dt_; }  // block x W
  const Scalar* x() const { return x_; }    // block x W: dt u
  const Scalar* u() const { return u_; }    // block x W
  const Scalar* B() const { return B_; }    // block rows of N, stride() apart, 0 up to Np
  const Scalar* C() const { return C_; }    // the same
  Index stride() const { return stride_; }
  Scalar* dt() { return dt_; }
  // n rows of y without what the states give: D u.
  void skip(Index n, Scalar* y) const {
    if (in_->D.absent()) {
      std::fill_n(y, n * W, Scalar(0));
      return;
    }
    const Scalar* const us = u_;
    const Row<Scalar> D_row = D();
    for (Index i = 0; i < n; ++i) aligned_row(y + i * W) = D_row * aligned_row(us + i * W);
  }

 private:
  Row<Scalar> of_channels(const ArrayView<const Scalar, 1>& x, const Channels& c) const {
    return x.absent() ? Row<Scalar>(Row<Scalar>::Zero()) : load_row<Scalar>(x.data + c.first, c.width);
  }

  void copy_states(const TokenView<const Storage>& from, Index t0, Index n, Scalar* to) const {
    const auto rows = from.rows(b_, channels(0).group, t0, n);
    const Index stride = stride_;
    for (Index column = 0; column < Np_; column += W) {
      const Index width = std::clamp<Index>(N_ - column, 0, W);
      for (Index i = 0; i < n; ++i)
        aligned_row(to + i * stride + column) =
            load_row<Scalar>(rows.data() + i * rows.outerStride() + column, width);
    }
  }

  const ScanInputs<Scalar, Storage>* in_ = nullptr;
  ScanPanels<Scalar> panels_;
  Index b_ = 0, first_ = 0, count_ = 0, p_ = 0;
  Index N_, Np_, stride_;
  Scalar *rates_, *D_, *bias_;
  Scalar *dt_, *x_, *u_, *B_, *C_;
};

// Runs the phases of one call: phases(shared, run), where run(count, visit) calls visit(kernel, i) for each
// 0 <= i < count through the options' executor and returns when all are done. Each worker has a kernel of its
// own. make_shared(arena) and make_kernel(arena) construct what all tasks share and a kernel; with an empty
// arena they say what memory that takes.
template <class MakeShared, class MakeKernel, class Phases>
void run_scan(const ScanOptions& options, const MakeShared& make_shared, const MakeKernel& make_kernel,
              const Phases& phases) {
  SerialExecutor serial;
  Executor& executor = options.executor ? *options.executor : serial;
  Workspace own;
  Arena need, kernel_need;
  static_cast<void>(make_shared(need));
  static_cast<void>(make_kernel(kernel_need));
  const std::size_t share = kernel_need.used();
  need.take<std::byte>(Index(share) * executor.threads());
  Arena arena = Scratch(options.workspace ? *options.workspace : own, 1, need.used()).arena(0);
  auto shared = make_shared(arena);
  std::byte* const shares = arena.take<std::byte>(Index(share) * executor.threads());
  phases(shared, [&](Index count, const auto& visit) {
    const auto task = [&](Index i, int worker) {
      Arena mine(shares + std::size_t(worker) * share);
      auto kernel = make_kernel(mine);
      visit(kernel, i);
    };
    executor.run(count, task);
  });
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
