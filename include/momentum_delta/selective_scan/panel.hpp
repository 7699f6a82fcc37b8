/// \file
/// Panels of channels: what every kernel of the selective scan reads. A panel is W channels of one group of
/// one sequence, a cache line of each token's row. Its state has a row of W channels for each of the N
/// states.
#pragma once

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/activation_rows.hpp"
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
void put_row(Row<Scalar> row, Storage* to, Index width, bool add) {
  if (add) row += load_row<Scalar>(to, width);
  store_row(row, to, width);
}

// One panel of the inputs, and a block of its tokens in Scalars.
template <class Scalar, class Storage>
class ScanTokens {
 public:
  static constexpr int W = panel_width<Scalar>;

  // Room for blocks of up to `block` tokens.
  ScanTokens(Arena& arena, const ScanSizes& s, Index block)
      : N_(s.N),
        Np_(padded_states(s.N)),
        stride_(round_up(Np_, W)),
        rate_(arena.take<Scalar>(Np_ * W)),
        dt_(take_rows<Scalar>(arena, block)),
        x_(take_rows<Scalar>(arena, block)),
        B_(arena.take<Scalar>(block * stride_)),
        C_(arena.take<Scalar>(block * stride_)) {}

  void open(const ScanInputs<Scalar, Storage>& inputs, Index b, const Channels& channels) {
    in_ = &inputs;
    b_ = b;
    c_ = channels;
    D_ = bias_ = Row<Scalar>::Zero();
    if (!in_->D.absent()) D_ = load_row<Scalar>(in_->D.data + c_.first, c_.width);
    if (!in_->delta_bias.absent()) bias_ = load_row<Scalar>(in_->delta_bias.data + c_.first, c_.width);
    std::fill_n(rate_, Np_ * W, Scalar(0));
    for (Index i = 0; i < c_.width; ++i)
      for (Index n = 0; n < N_; ++n) rate_[n * W + i] = decay_rate(in_->A.row(c_.first + i)[n]);
  }

  // Tokens [t0, t0 + n).
  void load(Index t0, Index n) {
    for (Index i = 0; i < n; ++i) {
      fetch(in_->u, t0 + i);
      fetch(in_->delta, t0 + i);
      const Row<Scalar> dt = step(t0 + i);
      aligned_row(dt_ + i * W) = dt;
      aligned_row(x_ + i * W) = dt * u(t0 + i);
      copy_states(in_->B, t0 + i, B_ + i * stride_);
      copy_states(in_->C, t0 + i, C_ + i * stride_);
    }
  }

  const ScanInputs<Scalar, Storage>& inputs() const { return *in_; }
  Index N() const { return N_; }
  Index Np() const { return Np_; }  // rows of a panel's state
  const Channels& channels() const { return c_; }
  bool has_z() const { return !in_->z.absent(); }
  bool softplus() const { return in_->delta_softplus; }

  // Fetches the row of a later token: they lie too far apart for the processor to foresee them, and often in
  // so few sets of the cache that more than a few at once would drive each other out.
  template <class View>
  void fetch(const View& rows, Index t) const {
    if (t + 8 >= rows.shape[1]) return;
    const auto* const row = rows.row(b_, t + 8) + c_.first;
    prefetch(row);
    prefetch(row + c_.width - 1);  // in the next line, unless rows start at one
  }

  // Of the panel
  const Scalar* rate() const { return rate_; }  // Np x W: see decay_rate
  const Row<Scalar>& D() const { return D_; }
  Scalar A(Index n, Index i) const { return in_->A.row(c_.first + i)[n]; }  // of channel i

  // Of a token
  Row<Scalar> u(Index t) const { return load_row<Scalar>(in_->u.row(b_, t) + c_.first, c_.width); }
  Row<Scalar> z(Index t) const { return load_row<Scalar>(in_->z.row(b_, t) + c_.first, c_.width); }
  Row<Scalar> delta(Index t) const {  // and the bias
    return load_row<Scalar>(in_->delta.row(b_, t) + c_.first, c_.width) + bias_;
  }
  Row<Scalar> y(Index t, const Row<Scalar>& Ch) const {
    return in_->D.absent() ? Ch : Row<Scalar>(Ch + D_ * u(t));
  }

  // Of the block
  const Scalar* dt() const { return dt_; }  // block x W
  const Scalar* x() const { return x_; }    // block x W: dt u
  const Scalar* B() const { return B_; }    // block rows of N, stride() apart, 0 up to Np
  const Scalar* C() const { return C_; }    // the same
  Index stride() const { return stride_; }
  Scalar* dt() { return dt_; }

 private:
  Row<Scalar> step(Index t) const { return in_->delta_softplus ? softplus_row<Scalar>(delta(t)) : delta(t); }

  void copy_states(const TokenView<const Storage>& from, Index t, Scalar* to) const {
    const Storage* const row = from.rows(b_, c_.group, t, 1).data();
    for (Index n = 0; n < Np_; n += W)
      aligned_row(to + n) = load_row<Scalar>(row + n, std::clamp<Index>(N_ - n, 0, W));
  }

  const ScanInputs<Scalar, Storage>* in_ = nullptr;
  Index b_ = 0;
  Channels c_{};
  Row<Scalar> D_, bias_;
  Index N_, Np_, stride_;
  Scalar* rate_;
  Scalar *dt_, *x_, *B_, *C_;
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
