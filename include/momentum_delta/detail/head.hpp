// One value head of one sequence, as the kernels see it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "momentum_delta/sequence.hpp"

namespace momentum_delta::detail {

// A gate's values over one sequence; an absent gate has its neutral value at every token.
template <class Scalar>
struct Gate {
  const Scalar* data;  // null: absent
  Index stride;
  Scalar neutral;

  Scalar operator[](Index t) const { return data ? data[t * stride] : neutral; }
};

template <class Scalar>
struct Head {
  RowsMap<const Scalar> q, k, v, p;           // T x K, T x K, T x V, T x K
  Gate<Scalar> log_alpha, log_mu, beta, eta;  // T each
  Scalar scale;

  Index T() const { return v.rows(); }
  Index K() const { return k.cols(); }
  Index V() const { return v.cols(); }
};

// Value head h of one sequence. Heads that share a query and key read the same memory.
template <class Scalar>
Head<Scalar> head_of(const Inputs<Scalar>& x, const SequenceTokens& tokens, Index h) {
  const Index HV = x.v.shape[2];
  const auto rows = [&](const TokenView<const Scalar>& view) {
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

}  // namespace momentum_delta::detail
