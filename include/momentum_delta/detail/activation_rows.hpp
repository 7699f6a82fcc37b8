/// \file
/// softplus and sigmoid (activations.hpp) of rows and arrays. Lane by lane, wherever the row stands.
#pragma once

#include "momentum_delta/activations.hpp"
#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/panel.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// Terms of log(1 + e) = 2 artanh(s) = 2 s (1 + s^2 / 3 + s^4 / 5 + ..) with s = e / (2 + e), which is at most
// 1/3 for e in [0, 1]: what they leave out is below 9^-terms / (2 terms + 1) of the value.
template <class Scalar>
inline constexpr int log1p_terms = std::is_same_v<Scalar, float> ? 7 : 16;

// Is it made of exp(-|x|)? Other types have the scalar functions, lane by lane.
template <class Scalar>
inline constexpr bool by_rows = std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>;

// exp(-|x|), of which the others are made. Over many rows this is a sweep of its own: the processor overlaps
// rows only as far as it looks ahead, and sees more of them where each takes fewer operations.
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> exp_of_minus_abs_row(const Row<Scalar>& x) {
  if constexpr (by_rows<Scalar>)
    return fast_decay_row<Scalar>(-x.abs());
  else
    return Row<Scalar>::Zero();  // which nobody reads
}

// e: exp(-|x|)
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> softplus_row(const Row<Scalar>& x, const Row<Scalar>& e) {
  if constexpr (by_rows<Scalar>) {
    const Row<Scalar> s = e / (e + Scalar(2)), s2 = s * s;
    constexpr int terms = log1p_terms<Scalar>;
    Row<Scalar> series = Row<Scalar>::Constant(Scalar(1) / Scalar(2 * terms - 1));
    for (int k = terms - 1; k-- > 0;) series = series * s2 + Scalar(1) / Scalar(2 * k + 1);
    return x.max(Scalar(0)) + Scalar(2) * s * series;
  } else {
    return by_lane<Scalar>([&](int i) { return softplus(Scalar(x[i])); });
  }
}

template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> sigmoid_row(const Row<Scalar>& x, const Row<Scalar>& e) {
  if constexpr (by_rows<Scalar>) {
    return where_positive<Scalar>(x, Row<Scalar>::Constant(Scalar(1)), e) / (e + Scalar(1));
  } else {
    return by_lane<Scalar>([&](int i) { return sigmoid(Scalar(x[i])); });
  }
}
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> sigmoid_row(const Row<Scalar>& x) {
  return sigmoid_row<Scalar>(x, exp_of_minus_abs_row<Scalar>(x));
}

// The sigmoids of n rows.
template <class Scalar>
EIGEN_DONT_INLINE void sigmoid_rows(Index n, const Scalar* x, Scalar* sigmoid) {
  constexpr int W = panel_width<Scalar>;
  for (Index i = 0; i < n; ++i)
    aligned_row(sigmoid + i * W) = exp_of_minus_abs_row<Scalar>(aligned_row(x + i * W));
  for (Index i = 0; i < n; ++i)
    aligned_row(sigmoid + i * W) = sigmoid_row<Scalar>(aligned_row(x + i * W), aligned_row(sigmoid + i * W));
}

// softplus of n rows, in place; e: room for as many, which becomes the sigmoids if they are wanted.
template <bool WantsSigmoids = false, class Scalar>
EIGEN_DONT_INLINE void softplus_rows(Index n, Scalar* x, Scalar* e) {
  constexpr int W = panel_width<Scalar>;
  for (Index i = 0; i < n; ++i) aligned_row(e + i * W) = exp_of_minus_abs_row<Scalar>(aligned_row(x + i * W));
  for (Index i = 0; i < n; ++i) {
    const Row<Scalar> x_i = aligned_row(x + i * W), e_i = aligned_row(e + i * W);
    aligned_row(x + i * W) = softplus_row<Scalar>(x_i, e_i);
    if constexpr (WantsSigmoids) aligned_row(e + i * W) = sigmoid_row<Scalar>(x_i, e_i);
  }
}

// sigmoid of every element of an Eigen array, as an expression. The exponent stays below where exp overflows.
template <class Array>
auto sigmoid_of(const Array& x) {
  using Scalar = typename Array::Scalar;
  constexpr Scalar end = (std::numeric_limits<Scalar>::max_exponent - 1) * std::numbers::ln2_v<Scalar>;
  return (1 + (-x).min(end).exp()).inverse();
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
