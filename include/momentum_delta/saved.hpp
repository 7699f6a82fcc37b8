/// \file
/// What a forward pass keeps for the backward pass: the state at chunk boundaries, never a state per token.
#pragma once

#include <algorithm>
#include <vector>

#include "momentum_delta/check.hpp"
#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta {

namespace detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar>
struct Record;
template <class Scalar>
struct Recorded;

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace detail

/// Filled by forward(x, y, saved, options) and read by backward(x, saved, ...), which must see the same x. It
/// can be used again, for any shape.
///
/// It holds 2 K V scalars for each `checkpoint_interval` chunks of a head's sequence (more chunks than there
/// are: the initial state alone), and V for each token if `keep_u`: u = v_t - p_t S_{t-1}, which the backward
/// pass otherwise solves for again. The backward pass rebuilds everything else chunk by chunk, with room for
/// the states of one interval; of an interval of several chunks all but the last are rebuilt twice.
template <class Scalar>
class Saved {
 public:
  /// checkpoint_interval: chunks from one kept state to the next. Throws std::invalid_argument if it is < 1.
  explicit Saved(Index checkpoint_interval = 1, bool keep_u = false)
      : wanted_interval_(checkpoint_interval), keep_u_(keep_u) {
    if (checkpoint_interval < 1)
      detail::Check("Saved").fail("checkpoint_interval = ", checkpoint_interval, " is less than 1");
  }

  /// Did no forward pass fill it, or was it moved from?
  bool empty() const { return !filled_ || first_.empty(); }
  Index chunk_size() const { return chunk_size_; }  ///< of the pass that filled it; 0: none did

 private:
  friend struct detail::Record<Scalar>;
  friend struct detail::Recorded<Scalar>;

  // The tokens from one checkpoint to the next.
  Index stride() const { return chunk_size_ * interval_; }

  // Where the state before token c * stride() of sequence n, head h lies: for each panel of columns, as the
  // forward kernels hold them, its K rows of S, then of M. The panel from `column` on is 2 K column elements
  // further.
  Index position(Index n, Index h, Index c) const {
    const Index count = first_[std::size_t(n) + 1] - first_[std::size_t(n)];
    const Index index = first_[std::size_t(n)] * sizes_.HV + h * count + c;
    return index * 2 * sizes_.K * sizes_.V;
  }

  Scalar* states() const { return reinterpret_cast<Scalar*>(states_.get()); }
  Scalar* u() const { return reinterpret_cast<Scalar*>(u_.get()); }

  Index wanted_interval_;
  bool keep_u_;
  bool filled_ = false;
  Index chunk_size_ = 0, interval_ = 1;  // interval_: at most the chunks of the longest sequence
  detail::Sizes sizes_{};
  std::vector<Index> offsets_;  // cu_seqlens
  std::vector<Index> first_;    // checkpoints of the sequences before n, for one head; N + 1
  detail::Memory states_;       // for each sequence, head and checkpoint: S and M
  detail::Memory u_;            // [B, T, HV, V], or empty
};

namespace detail {
inline namespace MOMENTUM_DELTA_TARGET {

// How a forward kernel writes one head of one sequence into a Saved.
template <class Scalar>
struct Record {
  Saved<Scalar>* saved;  // null: nothing is kept
  Index n, h;
  SequenceTokens tokens;

  // Makes room for a forward pass over x in chunks of chunk_size; what was held before is lost.
  template <class Storage>
  static void begin(Saved<Scalar>& saved, const Inputs<Scalar, Storage>& x, Index chunk_size) {
    const Sizes s = sizes_of(x);
    const Index longest_chunks = s.longest / chunk_size + (s.longest % chunk_size != 0);
    saved.filled_ = false;
    saved.sizes_ = s;
    saved.chunk_size_ = chunk_size;
    saved.interval_ = std::min(saved.wanted_interval_, std::max<Index>(longest_chunks, 1));
    saved.offsets_.assign(x.cu_seqlens.begin(), x.cu_seqlens.end());
    saved.first_.assign(1, 0);
    for (Index sequence = 0; sequence < s.N; ++sequence) {
      const Index count = tokens_of(x, sequence).count, stride = saved.stride();
      saved.first_.push_back(saved.first_.back() + count / stride + (count % stride != 0));
    }
    saved.states_.reserve(std::size_t(saved.first_.back() * s.HV * 2 * s.K * s.V) * sizeof(Scalar));
    if (saved.keep_u_) saved.u_.reserve(std::size_t(s.B * s.T * s.HV * s.V) * sizeof(Scalar));
  }
  static void finish(Saved<Scalar>& saved) { saved.filled_ = true; }

  // Is the state before token t kept?
  bool wants_state(Index t) const { return saved && t % saved->stride() == 0; }
  // One panel of it, `width` columns from `column` on; S(i), M(i): row i.
  template <class SRow, class MRow>
  void state(Index t, Index column, Index width, const SRow& S, const MRow& M) const {
    const Index K = saved->sizes_.K;
    Scalar* to = saved->states() + saved->position(n, h, t / saved->stride()) + 2 * K * column;
    for (Index i = 0; i < K; ++i, to += width) store_row<Scalar, Scalar>(S(i), to, width);
    for (Index i = 0; i < K; ++i, to += width) store_row<Scalar, Scalar>(M(i), to, width);
  }
  // The columns from `column` on of u_t.
  template <class Columns>
  void u(Index t, Index column, const Columns& u_t) const {
    if (!saved || !saved->keep_u_) return;
    const Sizes& s = saved->sizes_;
    Scalar* const to = saved->u() + ((tokens.b * s.T + tokens.begin + t) * s.HV + h) * s.V + column;
    Eigen::Map<Eigen::Array<Scalar, 1, Eigen::Dynamic>>(to, u_t.size()) = u_t;
  }
};

// How a backward kernel reads it.
template <class Scalar>
struct Recorded {
  const Saved<Scalar>& saved;
  Index n, h;
  SequenceTokens tokens;

  // Throws std::invalid_argument unless it was filled by a forward pass over inputs of x's shapes and
  // offsets.
  template <class Storage>
  static void check(const Check& check, const Saved<Scalar>& saved, const Inputs<Scalar, Storage>& x) {
    if (saved.empty()) check.fail("saved holds no forward pass");
    const Sizes was = saved.sizes_, is = sizes_of(x);
    const auto same = [&](const char* name, Index a, Index b) {
      if (a != b) check.fail("saved is of a forward pass with ", name, " = ", a, ", but x has ", b);
    };
    same("B", was.B, is.B);
    same("T", was.T, is.T);
    same("HK", was.HK, is.HK);
    same("HV", was.HV, is.HV);
    same("K", was.K, is.K);
    same("V", was.V, is.V);
    if (!std::equal(saved.offsets_.begin(), saved.offsets_.end(), x.cu_seqlens.begin(), x.cu_seqlens.end()))
      check.fail("saved is of a forward pass with other cu_seqlens");
  }
  // Chunks between two checkpoints.
  static Index interval(const Saved<Scalar>& saved) { return saved.interval_; }

  Index chunk_size() const { return saved.chunk_size_; }
  Index checkpoints() const { return tokens.count / saved.stride() + (tokens.count % saved.stride() != 0); }
  Index begin(Index checkpoint) const { return checkpoint * saved.stride(); }
  Index end(Index checkpoint) const { return std::min(tokens.count, (checkpoint + 1) * saved.stride()); }

  // The state before token begin(checkpoint): visit(column, width, S, M) for each panel of it, S and M of K
  // rows of `width`.
  template <class Visit>
  void state(Index checkpoint, const Visit& visit) const {
    constexpr Index W = panel_width<Scalar>;
    const Sizes& s = saved.sizes_;
    const Scalar* from = saved.states() + saved.position(n, h, checkpoint);
    for (Index column = 0; column < s.V; column += W) {
      const Index width = std::min(W, s.V - column);
      visit(column, width, from, from + s.K * width);
      from += 2 * s.K * width;
    }
  }
  bool has_u() const { return saved.keep_u_; }
  const Scalar* u(Index t) const {
    const Sizes& s = saved.sizes_;
    return saved.u() + ((tokens.b * s.T + tokens.begin + t) * s.HV + h) * s.V;
  }
  Index u_stride() const { return saved.sizes_.HV * saved.sizes_.V; }
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace detail
}  // namespace momentum_delta
