/// \file
/// What comes before the rule in most models: q and k of unit length, and p = alpha k. With their gradients.
#pragma once

#include <cmath>

#include "momentum_delta/check.hpp"
#include "momentum_delta/decay_mask.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// 1 / sqrt(|x|^2 + epsilon) = scale * factor. The scale is a power of two that keeps |scale x|^2 from
// overflowing.
template <class Scalar>
struct InverseNorm {
  Scalar scale = Scalar(1), factor;

  template <class Row>
  InverseNorm(const Row& x, Scalar epsilon) {
    Scalar largest = Scalar(0);
    for (Index d = 0; d < x.size(); ++d) largest = std::max(largest, std::abs(x[d]));
    if (largest > 1 && std::isfinite(largest)) scale = std::ldexp(Scalar(1), -std::ilogb(largest));
    Scalar sum = epsilon * scale * scale;
    for (Index d = 0; d < x.size(); ++d) sum += (scale * x[d]) * (scale * x[d]);
    factor = 1 / std::sqrt(sum);
  }
};

// visit(b, h) for every batch and head, whose tokens are rows.
template <class Scalar, class Visit>
void for_each_batch_and_head(const TokenView<Scalar>& x, const Visit& visit) {
  for (Index b = 0; b < x.shape[0]; ++b)
    for (Index h = 0; h < x.shape[2]; ++h) visit(b, h);
}

template <class Scalar>
void check_epsilon(const Check& check, Scalar epsilon) {
  if (!(epsilon > 0) || !std::isfinite(epsilon)) check.fail("epsilon = ", epsilon, " is not finite and > 0");
}

// What decay_keys and its gradient ask of their inputs; returns HV.
template <class Scalar>
Index check_decay_keys(const Check& check, const TokenView<const Scalar>& k,
                       const GateView<const Scalar>& log_alpha) {
  if (k.absent()) check.fail("k is missing; its shape is [B, T, HK, K]");
  if (log_alpha.absent()) check.fail("log_alpha is missing; its shape is [B, T, HV]");
  check.memory("k", k);
  const Index HK = k.shape[2], HV = log_alpha.shape[2];
  check.gate("log_alpha", log_alpha, {k.shape[0], k.shape[1], HV}, Check::Range::signed_log_gate);
  if (!groups_evenly(HV, HK))
    check.fail("log_alpha has ", HV, " heads, which is no positive multiple of the ", HK, " heads of k");
  return HV;
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// The epsilon of l2_normalize() where none is given. The one rule for short vectors: |x|^2 + epsilon under
/// the root, as in the published layer.
inline constexpr double l2_epsilon = 1e-6;

/// y = x / sqrt(|x|^2 + epsilon) for every vector of x [B, T, H, D]; a zero vector stays zero. y: the same
/// shape, assigned; it may be exactly the view x. Scalar: float, double or long double. Throws
/// std::invalid_argument if a shape or stride does not fit, if y shares memory with x otherwise, or unless
/// epsilon is finite and > 0.
template <class Scalar>
void l2_normalize(std::type_identity_t<TokenView<const Scalar>> x, const TokenView<Scalar>& y,
                  std::type_identity_t<Scalar> epsilon = Scalar(l2_epsilon)) {
  const detail::Check check("l2_normalize");
  if (x.absent()) check.fail("x is missing; its shape is [B, T, H, D]");
  check.memory("x", x);
  check.view("y", y, x.shape, "[B, T, H, D] of x");
  detail::check_epsilon<Scalar>(check, epsilon);
  detail::Aliases memory(check);
  memory.reads("x", x);
  memory.writes("y", y, "x", x);

  detail::for_each_batch_and_head(x, [&](Index b, Index h) {
    const auto from = x.rows(b, h, 0, x.shape[1]);
    auto to = y.rows(b, h, 0, x.shape[1]);
    for (Index t = 0; t < from.rows(); ++t) {
      const detail::InverseNorm<Scalar> r(from.row(t), epsilon);
      to.row(t) = (r.scale * from.row(t)) * r.factor;
    }
  });
}

/// Gradient of l2_normalize(). With r = 1 / sqrt(|x|^2 + epsilon) and y = r x,
///
///     dx = r (dy - y (y . dy))
///
/// which is finite for every finite x, dy / sqrt(epsilon) at 0. dx [B, T, H, D] is assigned, or added to if
/// `accumulate`; it may be exactly the view dy if not. Throws as l2_normalize does.
template <class Scalar>
void l2_normalize_backward(std::type_identity_t<TokenView<const Scalar>> x,
                           std::type_identity_t<TokenView<const Scalar>> dy, const TokenView<Scalar>& dx,
                           bool accumulate = false,
                           std::type_identity_t<Scalar> epsilon = Scalar(l2_epsilon)) {
  const detail::Check check("l2_normalize_backward");
  if (x.absent()) check.fail("x is missing; its shape is [B, T, H, D]");
  check.memory("x", x);
  check.view("dy", dy, x.shape, "[B, T, H, D] of x");
  check.view("dx", dx, x.shape, "[B, T, H, D] of x");
  detail::check_epsilon<Scalar>(check, epsilon);
  detail::Aliases memory(check);
  memory.reads("x", x);
  memory.reads("dy", dy);
  if (accumulate)
    memory.writes("dx", dx);
  else
    memory.writes("dx", dx, "dy", dy);

  detail::RowVector<Scalar> y(x.shape[3]);
  detail::for_each_batch_and_head(x, [&](Index b, Index h) {
    const auto from = x.rows(b, h, 0, x.shape[1]), upstream = dy.rows(b, h, 0, x.shape[1]);
    auto to = dx.rows(b, h, 0, x.shape[1]);
    for (Index t = 0; t < from.rows(); ++t) {
      const detail::InverseNorm<Scalar> r(from.row(t), epsilon);
      y = (r.scale * from.row(t)) * r.factor;
      const Scalar along = y.cwiseProduct(upstream.row(t)).sum();
      y = (r.scale * r.factor) * (upstream.row(t) - along * y);
      if (accumulate)
        to.row(t) += y;
      else
        to.row(t) = y;
    }
  });
}

/// p = exp(log_alpha) k, the vector that reads S in the published models, whose k has unit length.
/// k: [B, T, HK, K]; log_alpha: [B, T, HV], natural logs in [-inf, inf); p: [B, T, HV, K], assigned. Value
/// head h reads k's head h / (HV / HK). Throws std::invalid_argument if a shape, stride or gate is out of its
/// range, or p shares memory.
template <class Scalar>
void decay_keys(std::type_identity_t<TokenView<const Scalar>> k,
                std::type_identity_t<GateView<const Scalar>> log_alpha, const TokenView<Scalar>& p) {
  const detail::Check check("decay_keys");
  const Index HV = detail::check_decay_keys<Scalar>(check, k, log_alpha);
  check.view("p", p, {k.shape[0], k.shape[1], HV, k.shape[3]}, "[B, T, HV, K] of k and log_alpha");
  detail::Aliases memory(check);
  memory.reads("k", k);
  memory.reads("log_alpha", log_alpha);
  memory.writes("p", p);

  detail::for_each_batch_and_head(p, [&](Index b, Index h) {
    const auto from = k.rows(b, h / (HV / k.shape[2]), 0, k.shape[1]);
    auto to = p.rows(b, h, 0, k.shape[1]);
    for (Index t = 0; t < from.rows(); ++t) to.row(t) = decay(log_alpha.at(b, t, h)) * from.row(t);
  });
}

/// Gradients of decay_keys(): dk = alpha dp, summed over the value heads that read it, and
/// dlog_alpha = alpha <k, dp>. Both, of the shapes of k and log_alpha, are assigned, or added to if
/// `accumulate`, as when they already hold what backward() gave. Throws as decay_keys does.
template <class Scalar>
void decay_keys_backward(std::type_identity_t<TokenView<const Scalar>> k,
                         std::type_identity_t<GateView<const Scalar>> log_alpha,
                         std::type_identity_t<TokenView<const Scalar>> dp, const TokenView<Scalar>& dk,
                         std::type_identity_t<GateView<Scalar>> dlog_alpha, bool accumulate = false) {
  const detail::Check check("decay_keys_backward");
  const Index HV = detail::check_decay_keys<Scalar>(check, k, log_alpha);
  check.view("dp", dp, {k.shape[0], k.shape[1], HV, k.shape[3]}, "[B, T, HV, K] of k and log_alpha");
  check.view("dk", dk, k.shape, "[B, T, HK, K] of k");
  check.view("dlog_alpha", dlog_alpha, log_alpha.shape, "[B, T, HV] of log_alpha");
  detail::Aliases memory(check);
  memory.reads("k", k);
  memory.reads("log_alpha", log_alpha);
  memory.reads("dp", dp);
  memory.writes("dk", dk);
  memory.writes("dlog_alpha", dlog_alpha);

  detail::for_each_batch_and_head(dp, [&](Index b, Index h) {
    const Index group = HV / k.shape[2];
    const auto key = k.rows(b, h / group, 0, k.shape[1]), upstream = dp.rows(b, h, 0, k.shape[1]);
    auto to = dk.rows(b, h / group, 0, k.shape[1]);
    const bool add = accumulate || h % group != 0;
    for (Index t = 0; t < key.rows(); ++t) {
      const Scalar alpha = decay(log_alpha.at(b, t, h));
      if (add)
        to.row(t) += alpha * upstream.row(t);
      else
        to.row(t) = alpha * upstream.row(t);
      Scalar& dlog = dlog_alpha.at(b, t, h);
      dlog = (accumulate ? dlog : Scalar(0)) + alpha * key.row(t).cwiseProduct(upstream.row(t)).sum();
    }
  });
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
