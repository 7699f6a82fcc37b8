// What a forward pass keeps for the backward pass: the state at chunk boundaries, never a state per token.
#pragma once

#include <algorithm>
#include <vector>

#include "momentum_delta/check.hpp"
#include "momentum_delta/detail/head.hpp"

namespace momentum_delta {

namespace detail {

// Keeps nothing.
struct NoRecord {
  template <class State>
  void state(Index, const State&, const State&) const {}
  template <class Rows>
  void u(Index, const Rows&) const {}
};

}  // namespace detail

// Filled by forward(x, y, saved, options) and read by backward(x, saved, ...), which must see the same x.
// It holds 2 K V scalars for each `checkpoint_interval` chunks of a head's sequence, and V for each token if
// `keep_u`: u = v_t - p_t S_{t-1}, which the backward pass otherwise solves for once more. The backward pass
// rebuilds everything else chunk by chunk, with room for the states of one interval.
template <class Scalar>
class Saved {
 public:
  // Throws std::invalid_argument if checkpoint_interval < 1.
  explicit Saved(Index checkpoint_interval = 1, bool keep_u = false)
      : interval_(checkpoint_interval), keep_u_(keep_u) {
    if (interval_ < 1) detail::Check("Saved").fail("checkpoint_interval = ", interval_, " is less than 1");
  }

  bool empty() const { return !filled_; }  // no forward pass has filled it
  Index chunk_size() const { return chunk_size_; }
  Index checkpoint_interval() const { return interval_; }
  bool has_u() const { return keep_u_; }

  // Used by forward() and backward().

  // Room for a forward pass over x in chunks of chunk_size; what was held before is lost.
  void reset(const Inputs<Scalar>& x, Index chunk_size) {
    filled_ = false;
    sizes_ = detail::sizes_of(x);
    chunk_size_ = chunk_size;
    offsets_.assign(x.cu_seqlens.begin(), x.cu_seqlens.end());
    first_.assign(1, 0);
    for (Index n = 0; n < sizes_.N; ++n) {
      const Index tokens = detail::tokens_of(x, n).count;
      first_.push_back(first_.back() + (tokens + stride() - 1) / stride());
    }
    states_.resize(std::size_t(first_.back() * sizes_.HV * 2 * sizes_.K * sizes_.V));
    u_.resize(keep_u_ ? std::size_t(sizes_.B * sizes_.T * sizes_.HV * sizes_.V) : 0);
  }
  void finish() { filled_ = true; }

  // Throws std::invalid_argument unless it was filled by a forward pass over inputs of x's shapes and
  // offsets.
  void check(const detail::Check& check, const Inputs<Scalar>& x) const {
    const detail::Sizes s = detail::sizes_of(x);
    if (!filled_) check.fail("saved holds no forward pass");
    const auto same = [&](const char* name, Index was, Index is) {
      if (was != is) check.fail("saved is of a forward pass with ", name, " = ", was, ", but x has ", is);
    };
    same("B", sizes_.B, s.B);
    same("T", sizes_.T, s.T);
    same("HK", sizes_.HK, s.HK);
    same("HV", sizes_.HV, s.HV);
    same("K", sizes_.K, s.K);
    same("V", sizes_.V, s.V);
    if (!std::equal(offsets_.begin(), offsets_.end(), x.cu_seqlens.begin(), x.cu_seqlens.end()))
      check.fail("saved is of a forward pass with other cu_seqlens");
  }

  // The tokens from one checkpoint to the next.
  Index stride() const { return chunk_size_ * interval_; }

  // The state before token c * stride() of sequence n, head h: 2 K x V, S above M.
  detail::RowsMap<Scalar> state(Index n, Index h, Index c) {
    return {states_.data() + position(n, h, c), 2 * sizes_.K, sizes_.V, Eigen::OuterStride<>(sizes_.V)};
  }
  detail::RowsMap<const Scalar> state(Index n, Index h, Index c) const {
    return {states_.data() + position(n, h, c), 2 * sizes_.K, sizes_.V, Eigen::OuterStride<>(sizes_.V)};
  }

  // u, [B, T, HV, V]
  TokenView<Scalar> u() { return {u_.data(), {sizes_.B, sizes_.T, sizes_.HV, sizes_.V}}; }
  TokenView<const Scalar> u() const { return {u_.data(), {sizes_.B, sizes_.T, sizes_.HV, sizes_.V}}; }

 private:
  Index position(Index n, Index h, Index c) const {
    const Index count = first_[std::size_t(n) + 1] - first_[std::size_t(n)];
    const Index index = first_[std::size_t(n)] * sizes_.HV + h * count + c;
    return index * 2 * sizes_.K * sizes_.V;
  }

  Index interval_;
  bool keep_u_;
  bool filled_ = false;
  Index chunk_size_ = 0;
  detail::Sizes sizes_{};
  std::vector<Index> offsets_;  // cu_seqlens
  std::vector<Index> first_;    // checkpoints of the sequences before n, for one head; N + 1
  std::vector<Scalar> states_;  // for each sequence, head and checkpoint: S, then M
  std::vector<Scalar> u_;       // [B, T, HV, V], or empty
};

namespace detail {

// One head of one sequence in a Saved, for a forward kernel to write.
template <class Scalar>
struct Record {
  Saved<Scalar>& saved;
  Index n, h;
  SequenceTokens tokens;

  // Called with the state before token t, for every t at which a chunk starts.
  template <class State>
  void state(Index t, const State& S, const State& M) const {
    if (t % saved.stride() != 0) return;
    auto both = saved.state(n, h, t / saved.stride());
    both.topRows(S.rows()) = S;
    both.bottomRows(M.rows()) = M;
  }
  // Called with u of the tokens from t on.
  template <class Rows>
  void u(Index t, const Rows& rows) const {
    if (saved.has_u()) saved.u().rows(tokens.b, h, tokens.begin + t, rows.rows()) = rows;
  }
};

// The same for a backward kernel to read.
template <class Scalar>
struct Recorded {
  const Saved<Scalar>& saved;
  Index n, h;
  SequenceTokens tokens;

  Index checkpoints() const { return (tokens.count + saved.stride() - 1) / saved.stride(); }
  Index begin(Index checkpoint) const { return checkpoint * saved.stride(); }
  Index end(Index checkpoint) const { return std::min(tokens.count, (checkpoint + 1) * saved.stride()); }

  // The state before token begin(checkpoint).
  void state(Index checkpoint, Matrix<Scalar>& S, Matrix<Scalar>& M) const {
    const auto both = saved.state(n, h, checkpoint);
    S = both.topRows(S.rows());
    M = both.bottomRows(M.rows());
  }
  bool has_u() const { return saved.has_u(); }
  RowsMap<const Scalar> u(Index t, Index count) const {
    return saved.u().rows(tokens.b, h, tokens.begin + t, count);
  }
};

}  // namespace detail
}  // namespace momentum_delta
