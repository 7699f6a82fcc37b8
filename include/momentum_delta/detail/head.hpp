/// \file
/// One value head of one sequence, as the kernels see it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/sequence.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// A gate's values over one sequence; an absent gate has its neutral value at every token.
template <class Scalar>
struct Gate {
  const Scalar* data;  // null: absent
  Index stride;
  Scalar neutral;

  Scalar operator[](Index t) const { return data ? data[t * stride] : neutral; }
};

template <class Scalar, class Storage = Scalar>
struct Head {
  RowsMap<const Storage> q, k, v, p;          // T x K, T x K, T x V, T x K
  Gate<Scalar> log_alpha, log_mu, beta, eta;  // T each
  Scalar scale;

  Index T() const { return v.rows(); }
  Index K() const { return k.cols(); }
  Index V() const { return v.cols(); }
};

// Value head h of one sequence. Heads that share a query and key read the same memory.
template <class Scalar, class Storage>
Head<Scalar, Storage> head_of(const Inputs<Scalar, Storage>& x, const SequenceTokens& tokens, Index h) {
  const Index HV = x.v.shape[2];
  const auto rows = [&](const TokenView<const Storage>& view) {
    return view.rows(tokens.b, h / (HV / view.shape[2]), tokens.begin, tokens.count);
  };
  const auto gate = [&](const GateView<const Scalar>& view, Scalar neutral) {
    const auto& s = view.stride;
    return view.empty()
               ? Gate<Scalar>{nullptr, 0, neutral}
               : Gate<Scalar>{view.data + tokens.b * s[0] + tokens.begin * s[1] + h * s[2], s[1], neutral};
  };
  using std::sqrt;
  return {rows(x.q),
          rows(x.k),
          rows(x.v),
          rows(x.p.absent() ? x.k : x.p),
          gate(x.log_alpha, Scalar(0)),
          gate(x.log_mu, Scalar(-std::numeric_limits<Real<Scalar>>::infinity())),
          gate(x.beta, Scalar(1)),
          gate(x.eta, Scalar(1)),
          x.scale ? *x.scale : Scalar(1 / sqrt(Real<Scalar>(std::max<Index>(x.k.shape[3], 1))))};
}

// S, M or a gradient of one head in the caller's memory, K x V; data null: absent.
template <class Scalar>
struct StateRows {
  Scalar* data = nullptr;
  Index stride = 0;

  // The columns from `column` on.
  StateRows from(Index column) const { return {data ? data + column : nullptr, stride}; }

  // Columns [begin, end) into panels of panel_size elements, panel_stride apart, with 0 in their rows past K;
  // zeros if absent.
  void read(Index begin, Index end, Index K, std::remove_const_t<Scalar>* panels, Index panel_size,
            Index panel_stride) const {
    using Value = std::remove_const_t<Scalar>;
    constexpr Index W = panel_width<Value>;
    for (Index column = begin; column < end; column += W, panels += panel_stride) {
      const Index rows = data ? K : 0;
      for (Index i = 0; i < rows; ++i)
        aligned_row(panels + i * W) = load_row<Value>(data + i * stride + column, std::min(W, end - column));
      std::fill(panels + rows * W, panels + panel_size, Value(0));
    }
  }

  // Columns from `begin` on into a matrix of as many; zeros if absent.
  template <class Columns>
  void read(Index begin, Columns& to) const {
    if (data == nullptr)
      to.setZero();
    else
      to = columns(begin, to);
  }

  // The other way, assigned or added; nothing if absent.
  template <class Columns>
  void write(Index begin, const Columns& from, bool add = false) const {
    if (data == nullptr) return;
    auto to = columns(begin, from);
    if (add)
      to += from;
    else
      to = from;
  }

  // The panels of read(), times `factor`, assigned or added; nothing if absent.
  void write(Index begin, Index end, Index K, const Scalar* panels, Index panel_stride,
             Scalar factor = Scalar(1), bool add = false) const {
    constexpr Index W = panel_width<Scalar>;
    if (data == nullptr) return;
    for (Index column = begin; column < end; column += W, panels += panel_stride) {
      const Index width = std::min(W, end - column);
      for (Index i = 0; i < K; ++i) {
        Scalar* const to = data + i * stride + column;
        Row<Scalar> row = factor * aligned_row(panels + i * W);
        if (add) row += load_row<Scalar>(to, width);
        store_row(row, to, width);
      }
    }
  }

 private:
  template <class Columns>
  RowsMap<Scalar> columns(Index begin, const Columns& like) const {
    return {data + begin, like.rows(), like.cols(), Eigen::OuterStride<>(stride)};
  }
};

template <class Scalar>
StateRows<Scalar> state_rows(const StateView<Scalar>& x, Index n, Index h) {
  if (x.empty()) return {};
  return {x.data + n * x.stride[0] + h * x.stride[1], x.stride[2]};
}

// A state's two halves.
template <class Scalar>
struct StatePair {
  StateRows<Scalar> S, M;
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
