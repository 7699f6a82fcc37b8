/// \file
/// How Mamba parameterises and initialises the selective scan (Gu and Dao 2023, sections 3.5 and 3.6): A =
/// -exp(A_log), S4D-real, and a bias that makes softplus give a chosen dt.
#pragma once

#include <cmath>
#include <type_traits>

#include "momentum_delta/activations.hpp"
#include "momentum_delta/selective_scan/check.hpp"

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// A = -exp(A_log) <= 0 for every A_log; both [D, N]. A is assigned and may be exactly the view A_log. Throws
/// std::invalid_argument if a shape or stride does not fit or A shares memory with A_log otherwise.
template <class Scalar>
void negative_exp(std::type_identity_t<ArrayView<const Scalar, 2>> A_log, const ArrayView<Scalar, 2>& A) {
  const detail::Check check("negative_exp");
  detail::check_array(check, "A_log", A_log, A_log.shape, "[D, N]");
  detail::check_array(check, "A", A, A_log.shape, "[D, N] of A_log");
  detail::Aliases memory(check);
  memory.reads("A_log", A_log);
  memory.writes("A", A, "A_log", A_log);
  for (Index d = 0; d < A.shape[0]; ++d)
    for (Index n = 0; n < A.shape[1]; ++n) A.row(d)[n] = -std::exp(A_log.row(d)[n]);
}

/// Gradient of negative_exp(): dA_log = A dA. All [D, N]; dA_log is assigned, or added to if `accumulate`,
/// and may be exactly the view dA if not. Throws as negative_exp() does.
template <class Scalar>
void negative_exp_backward(std::type_identity_t<ArrayView<const Scalar, 2>> A,
                           std::type_identity_t<ArrayView<const Scalar, 2>> dA,
                           const ArrayView<Scalar, 2>& dA_log, bool accumulate = false) {
  const detail::Check check("negative_exp_backward");
  detail::check_array(check, "A", A, A.shape, "[D, N]");
  detail::check_array(check, "dA", dA, A.shape, "[D, N] of A");
  detail::check_array(check, "dA_log", dA_log, A.shape, "[D, N] of A");
  detail::Aliases memory(check);
  memory.reads("A", A);
  memory.reads("dA", dA);
  if (accumulate)
    memory.writes("dA_log", dA_log);
  else
    memory.writes("dA_log", dA_log, "dA", dA);
  for (Index d = 0; d < A.shape[0]; ++d) {
    for (Index n = 0; n < A.shape[1]; ++n) {
      Scalar& to = dA_log.row(d)[n];
      to = (accumulate ? to : Scalar(0)) + A.row(d)[n] * dA.row(d)[n];
    }
  }
}

/// The initial A_log [D, N], assigned: A_n = -(n + 1) for 0 <= n < N in every channel (S4D-real; Gu,
/// Gupta, Goel and Re 2022, "On the Parameterization and Initialization of Diagonal State Space Models").
/// Throws std::invalid_argument if it is absent or a stride does not fit.
template <class Scalar>
void initialize_A_log(const ArrayView<Scalar, 2>& A_log) {
  detail::check_array(detail::Check("initialize_A_log"), "A_log", A_log, A_log.shape, "[D, N]");
  for (Index d = 0; d < A_log.shape[0]; ++d)
    for (Index n = 0; n < A_log.shape[1]; ++n) A_log.row(d)[n] = std::log(Scalar(n + 1));
}

/// The initial delta_bias [D], assigned: softplus(delta_bias) is log-uniform in [dt_min, dt_max]. uniform():
/// random numbers, uniform in [0, 1). Throws std::invalid_argument if it is absent, a stride does not fit, or
/// unless 0 < dt_min <= dt_max and both are finite.
template <class Scalar, class Uniform>
void initialize_delta_bias(const ArrayView<Scalar, 1>& delta_bias, Uniform&& uniform,
                           std::type_identity_t<Scalar> dt_min = Scalar(1e-3),
                           std::type_identity_t<Scalar> dt_max = Scalar(0.1)) {
  const detail::Check check("initialize_delta_bias");
  detail::check_array(check, "delta_bias", delta_bias, delta_bias.shape, "[D]");
  if (!(dt_min > 0)) check.fail("dt_min = ", dt_min, " is not > 0");
  if (!(dt_max >= dt_min) || !std::isfinite(dt_max))
    check.fail("dt_max = ", dt_max, " is not finite and >= dt_min = ", dt_min);
  const Scalar low = std::log(dt_min), high = std::log(dt_max);
  for (Index d = 0; d < delta_bias.shape[0]; ++d)
    delta_bias.data[d] = softplus_inverse(std::exp(low + (high - low) * Scalar(uniform())));
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
