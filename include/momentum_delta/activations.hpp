// softplus, sigmoid and silu of one number, right for every finite one: no exponential overflows, and nothing
// is lost to cancellation. Scalar: float, double or long double; computed in Scalar.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "momentum_delta/types.hpp"

namespace momentum_delta {

// log(1 + exp(x)). Its derivative is sigmoid(x).
template <class Scalar>
Scalar softplus(Scalar x) {
  return std::max(x, Scalar(0)) + std::log1p(std::exp(-std::abs(x)));
}

// The x with softplus(x) = y, for y > 0.
template <class Scalar>
Scalar softplus_inverse(Scalar y) {
  return y + std::log(-std::expm1(-y));
}

// 1 / (1 + exp(-x)). Its derivative is sigmoid(x) sigmoid(-x).
template <class Scalar>
Scalar sigmoid(Scalar x) {
  const Scalar e = std::exp(-std::abs(x));
  return (x < 0 ? e : Scalar(1)) / (1 + e);
}

// x sigmoid(x).
template <class Scalar>
Scalar silu(Scalar x) {
  return x * sigmoid(x);
}

namespace detail {

// sigmoid of every element of an array, in packets. The exponent stays below where exp overflows.
template <class Array>
auto sigmoid_of(const Array& x) {
  using Scalar = typename Array::Scalar;
  constexpr Scalar end = (std::numeric_limits<Scalar>::max_exponent - 1) * std::numbers::ln2_v<Scalar>;
  return (1 + (-x).min(end).exp()).inverse();
}

}  // namespace detail
}  // namespace momentum_delta
