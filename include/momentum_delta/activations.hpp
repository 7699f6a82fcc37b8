/// \file
/// Scalar functions that neither overflow nor lose digits for any finite argument. A complex argument is for
/// derivatives by complex step: its real part chooses the form.
#pragma once

#include <cmath>
#include <complex>

#include "momentum_delta/types.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// log(1 + x), |x| <= 1. (std::log1p takes no complex number.)
template <class Real>
Real log1p_of(const Real& x) {
  return std::log1p(x);
}
template <class Real>
std::complex<Real> log1p_of(const std::complex<Real>& x) {
  const Real re = x.real(), im = x.imag();
  return {std::log1p(re * (2 + re) + im * im) / 2, std::atan2(im, 1 + re)};
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), in [0, inf]; its derivative is sigmoid(x). Natural log.
template <class Scalar>
Scalar softplus(Scalar x) {
  using std::exp, std::real;
  return real(x) > 0 ? x + detail::log1p_of(Scalar(exp(-x))) : detail::log1p_of(Scalar(exp(x)));
}

/// The x with softplus(x) = y, for y > 0: log(exp(y) - 1) = y + log(1 - exp(-y)). -inf at 0, NaN below.
/// Scalar: float, double or long double.
template <class Scalar>
Scalar softplus_inverse(Scalar y) {
  return y + std::log(-std::expm1(-y));
}

/// 1 / (1 + exp(-x)), in [0, 1]; its derivative is sigmoid(x) sigmoid(-x).
template <class Scalar>
Scalar sigmoid(Scalar x) {
  using std::exp, std::real;
  const Scalar e = exp(real(x) > 0 ? -x : x);  // at most 1
  return (real(x) > 0 ? Scalar(1) : e) / (Scalar(1) + e);
}

/// x sigmoid(x); its derivative is s (1 + x (1 - s)) with s = sigmoid(x). NaN at -inf.
template <class Scalar>
Scalar silu(Scalar x) {
  return x * sigmoid(x);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
