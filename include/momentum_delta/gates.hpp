/// \file
/// The gates of the MomentumDeltaNet layer, from its raw projections, one number a token and value head. With
/// parameters of the head and f = exp(log_factor),
///
///     eta       = 1 + tanh(e)                                        e = W_e x / tau
///     log_mu    = -exp(Mu_log) softplus(m + mu_bias)                 m = W_m x
///     beta      = z^2 / (1 + z^2) sigmoid(b)                         b = W_b x,  z = eta f
///     log_alpha = -log(1 + z^2) - exp(A_log) softplus(a + dt_bias)   a = W_a x
///
/// (fla, MomentumDeltaNet layer: there theta = arctan(z), beta_max = sin^2 theta and alpha_max = cos^2
/// theta.)
///
/// What the constraint buys. Let p = alpha k with |k| = 1 and let that key alone be written: along k, with
/// v = 0, the recurrence is
///
///     (m, s) <- (mu m + eta alpha s,  alpha s - beta (mu m + eta alpha s)),
///
/// a matrix of determinant alpha mu and trace mu + alpha - alpha beta eta. Its eigenvalues lie inside the
/// unit circle if
///
///     alpha mu < 1,  (1 - alpha) (1 - mu) + alpha beta eta > 0  and  alpha beta eta < (1 + alpha) (1 + mu).
///
/// With beta <= z^2 / (1 + z^2) and alpha <= 1 / (1 + z^2) the product alpha beta eta is at most
/// eta z^2 / (1 + z^2)^2 <= eta / 4 <= 1/2, so the third holds with room whatever the parameters are, and the
/// first two while alpha and mu are below 1 (at 1 an eigenvalue may lie on the circle). With p = k the third
/// would read beta eta < (1 + alpha) (1 + mu), which beta near 1, eta near 2 and strong decays break.
///
/// Numerics. With w = log z^2 = 2 (log_factor + log 2 - softplus(-2 e)): eta = 2 sigmoid(2 e),
/// z^2 / (1 + z^2) = sigmoid(w), log(1 + z^2) = softplus(w). Every finite projection and parameter gives
/// gates in their range, gradients included; log_alpha and log_mu may come out as -inf, which is exact for
/// the rule.
#pragma once

#include <cmath>
#include <limits>
#include <numbers>
#include <optional>
#include <span>

#include "momentum_delta/activations.hpp"
#include "momentum_delta/check.hpp"

namespace momentum_delta {

/// The projections that gates() reads, finite, or their gradients: [B, T, HV] each. None may be absent.
template <class Scalar>
struct RawGates {
  GateView<Scalar> a{},  ///< W_a x, of log_alpha
      b{},               ///< W_b x, of beta
      m{},               ///< W_m x, of log_mu
      e{};               ///< W_e x / tau, of eta and, by z, of beta and log_alpha

  /// The same views, to be read.
  operator RawGates<const Scalar>() const requires(!std::is_const_v<Scalar>) { return {a, b, m, e}; }
};

/// The gates that the rule reads, as Inputs has them, or their gradients: [B, T, HV] each. None may be
/// absent.
template <class Scalar>
struct Gates {
  GateView<Scalar> log_alpha{},  ///< in [-inf, 0], natural logs
      log_mu{},                  ///< in [-inf, 0], or [min_log_mu, 0], natural logs
      beta{},                    ///< in [0, 1], or [0, 2] with allow_neg_eigval
      eta{};                     ///< in [0, 2]

  /// The same views, to be read.
  operator Gates<const Scalar>() const requires(!std::is_const_v<Scalar>) {
    return {log_alpha, log_mu, beta, eta};
  }
};

/// The parameters of gates(), finite, or their gradients: one number a value head, HV each. None may be
/// absent.
template <class Scalar>
struct GateParameters {
  std::span<Scalar> A_log{},  ///< natural log of the rate of decay of S
      dt_bias{},              ///< added to a
      Mu_log{},               ///< natural log of the rate of decay of M
      mu_bias{},              ///< added to m
      log_factor{};           ///< natural log of f, z = eta f

  /// The same spans, to be read.
  operator GateParameters<const Scalar>() const requires(!std::is_const_v<Scalar>) {
    return {A_log, dt_bias, Mu_log, mu_bias, log_factor};
  }
};

/// What checkpoints may ask of gates() beyond the formulas above.
struct GateOptions {
  /// log_mu is raised to it, as for checkpoints trained so: a natural log in [-inf, 0]; absent: not clamped,
  /// which the rule does not need. The gradient of a raised log_mu is 0.
  std::optional<double> min_log_mu{};

  /// Doubles beta, so that 1 - beta eta, and with it an eigenvalue of the transition, may be negative. beta
  /// may then exceed z^2 / (1 + z^2): the stability constraint above no longer holds.
  bool allow_neg_eigval = false;
};

}  // namespace momentum_delta

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// exp(log_scale) softplus(x): its derivative by log_scale is itself, that by x is dx_ratio times as large.
// exp and softplus alone may leave the range of Scalar where their product does not.
template <class Scalar>
struct ScaledSoftplus {
  Scalar value, dx_ratio;

  // The gradient by log_scale from that by the value; a value of inf has none.
  Scalar gradient(Scalar upstream) const { return upstream == 0 ? Scalar(0) : value * upstream; }

  ScaledSoftplus(Scalar log_scale, Scalar x) {
    constexpr Scalar tiny = std::numeric_limits<Scalar>::min();
    const Scalar scale = std::exp(log_scale), y = softplus(x);
    const bool small = x < std::log(std::numeric_limits<Scalar>::epsilon());  // softplus(x) = exp(x), rounded
    dx_ratio = small ? Scalar(1) : sigmoid(x) / y;
    value = scale >= tiny && std::isfinite(scale) && y >= tiny
                ? scale * y
                : std::exp(log_scale + (small ? x : std::log(y)));
  }
};

template <class Scalar>
void check_gates(const Check& check, const RawGates<const Scalar>& raw,
                 const GateParameters<const Scalar>& parameters, const GateOptions& options) {
  if (raw.a.absent()) check.fail("a is missing; its shape is [B, T, HV]");
  check.memory("a", raw.a);
  const auto projection = [&](const char* name, const GateView<const Scalar>& x) {
    if (x.absent()) check.fail(name, " is missing; its shape is [B, T, HV] of a");
    check.gate(name, x, raw.a.shape, Check::Range::finite);
  };
  projection("a", raw.a);
  projection("b", raw.b);
  projection("m", raw.m);
  projection("e", raw.e);
  const auto parameter = [&](const char* name, std::span<const Scalar> values) {
    const Index HV = raw.a.shape[2];
    if (Index(values.size()) != HV) check.fail(name, " has ", values.size(), " elements, not HV = ", HV);
    for (std::size_t h = 0; h < values.size(); ++h)
      if (!std::isfinite(values[h])) check.fail(name, "[", h, "] = ", values[h], " is not finite");
  };
  parameter("A_log", parameters.A_log);
  parameter("dt_bias", parameters.dt_bias);
  parameter("Mu_log", parameters.Mu_log);
  parameter("mu_bias", parameters.mu_bias);
  parameter("log_factor", parameters.log_factor);
  if (options.min_log_mu && !(*options.min_log_mu <= 0))
    check.fail("options.min_log_mu = ", *options.min_log_mu, " is not in [-inf, 0]");
}

template <class Scalar>
void read_gates(Aliases& memory, const RawGates<const Scalar>& raw,
                const GateParameters<const Scalar>& parameters) {
  memory.reads("a", raw.a);
  memory.reads("b", raw.b);
  memory.reads("m", raw.m);
  memory.reads("e", raw.e);
  const auto parameter = [&](const char* name, std::span<const Scalar> values) {
    memory.reads(name, StridedView<const Scalar, 1>(values.data(), {Index(values.size())}));
  };
  parameter("A_log", parameters.A_log);
  parameter("dt_bias", parameters.dt_bias);
  parameter("Mu_log", parameters.Mu_log);
  parameter("mu_bias", parameters.mu_bias);
  parameter("log_factor", parameters.log_factor);
}

// One token of one head: what its gates are made of.
template <class Scalar>
struct GateTerms {
  Scalar e, b, w, beta_scale, lowest_log_mu;
  ScaledSoftplus<Scalar> alpha, mu;  // rates of decay

  GateTerms(const RawGates<const Scalar>& raw, const GateParameters<const Scalar>& parameters,
            const GateOptions& options, Index batch, Index t, std::size_t head)
      : e(raw.e.at(batch, t, Index(head))),
        b(raw.b.at(batch, t, Index(head))),
        w(2 * (parameters.log_factor[head] + (std::numbers::ln2_v<Scalar> - softplus(-2 * e)))),
        beta_scale(Scalar(options.allow_neg_eigval ? 2 : 1)),
        lowest_log_mu(Scalar(options.min_log_mu.value_or(-std::numeric_limits<double>::infinity()))),
        alpha(parameters.A_log[head], raw.a.at(batch, t, Index(head)) + parameters.dt_bias[head]),
        mu(parameters.Mu_log[head], raw.m.at(batch, t, Index(head)) + parameters.mu_bias[head]) {}

  Scalar eta() const { return 2 * sigmoid(2 * e); }
  Scalar beta() const { return beta_scale * sigmoid(w) * sigmoid(b); }
  Scalar log_alpha() const { return -softplus(w) - alpha.value; }
  bool raised() const { return -mu.value < lowest_log_mu; }
  Scalar log_mu() const { return raised() ? lowest_log_mu : -mu.value; }
};

template <class Scalar>
void gates_of_head(const RawGates<const Scalar>& raw, const GateParameters<const Scalar>& parameters,
                   const Gates<Scalar>& y, const GateOptions& options, Index h) {
  for (Index b = 0; b < raw.a.shape[0]; ++b) {
    for (Index t = 0; t < raw.a.shape[1]; ++t) {
      const GateTerms<Scalar> terms(raw, parameters, options, b, t, std::size_t(h));
      y.eta.at(b, t, h) = terms.eta();
      y.log_mu.at(b, t, h) = terms.log_mu();
      y.beta.at(b, t, h) = terms.beta();
      y.log_alpha.at(b, t, h) = terms.log_alpha();
    }
  }
}

template <class Scalar>
void gates_backward_of_head(const RawGates<const Scalar>& raw, const GateParameters<const Scalar>& parameters,
                            const Gates<const Scalar>& dy, const RawGates<Scalar>& draw,
                            const GateParameters<Scalar>& dparameters, const GateOptions& options,
                            bool accumulate, Index h) {
  Scalar dA_log = 0, ddt_bias = 0, dMu_log = 0, dmu_bias = 0, dlog_factor = 0;
  for (Index b = 0; b < raw.a.shape[0]; ++b) {
    for (Index t = 0; t < raw.a.shape[1]; ++t) {
      const GateTerms<Scalar> terms(raw, parameters, options, b, t, std::size_t(h));
      const Scalar beta = terms.beta(), dbeta = dy.beta.at(b, t, h), dlog_alpha = dy.log_alpha.at(b, t, h);
      const Scalar dw = beta * sigmoid(-terms.w) * dbeta - sigmoid(terms.w) * dlog_alpha;
      const Scalar dalpha_rate = terms.alpha.gradient(-dlog_alpha);
      const Scalar dmu_rate = terms.raised() ? Scalar(0) : terms.mu.gradient(-dy.log_mu.at(b, t, h));
      const Scalar da = dalpha_rate * terms.alpha.dx_ratio, dm = dmu_rate * terms.mu.dx_ratio;
      draw.a.at(b, t, h) = da;
      draw.b.at(b, t, h) = beta * sigmoid(-terms.b) * dbeta;
      draw.m.at(b, t, h) = dm;
      draw.e.at(b, t, h) = sigmoid(-2 * terms.e) * (2 * terms.eta() * dy.eta.at(b, t, h) + 4 * dw);
      dA_log += dalpha_rate;
      ddt_bias += da;
      dMu_log += dmu_rate;
      dmu_bias += dm;
      dlog_factor += 2 * dw;
    }
  }
  const auto add = [&](std::span<Scalar> to, Scalar sum) {
    Scalar& value = to[std::size_t(h)];
    value = accumulate ? value + sum : sum;
  };
  add(dparameters.A_log, dA_log);
  add(dparameters.dt_bias, ddt_bias);
  add(dparameters.Mu_log, dMu_log);
  add(dparameters.mu_bias, dmu_bias);
  add(dparameters.log_factor, dlog_factor);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// y from the raw projections, by the formulas at the head of this file; y is assigned, [B, T, HV] each.
/// Scalar: float, double or long double. Throws std::invalid_argument, before anything is written, if a shape
/// or stride does not fit, a projection or parameter is not finite, min_log_mu is out of its range, or an
/// output shares memory with anything else.
template <class Scalar>
void gates(const std::type_identity_t<RawGates<const Scalar>>& raw,
           const std::type_identity_t<GateParameters<const Scalar>>& parameters, const Gates<Scalar>& y,
           const GateOptions& options = {}) {
  const detail::Check check("gates");
  detail::check_gates<Scalar>(check, raw, parameters, options);
  const auto& shape = raw.a.shape;
  check.view("log_alpha", y.log_alpha, shape, "[B, T, HV] of a");
  check.view("log_mu", y.log_mu, shape, "[B, T, HV] of a");
  check.view("beta", y.beta, shape, "[B, T, HV] of a");
  check.view("eta", y.eta, shape, "[B, T, HV] of a");
  detail::Aliases memory(check);
  detail::read_gates<Scalar>(memory, raw, parameters);
  memory.writes("log_alpha", y.log_alpha);
  memory.writes("log_mu", y.log_mu);
  memory.writes("beta", y.beta);
  memory.writes("eta", y.eta);

  for (Index h = 0; h < shape[2]; ++h) detail::gates_of_head(raw, parameters, y, options, h);
}

/// Gradients of gates(), from dy, those by its outputs. draw is assigned. dparameters, sums over all tokens,
/// are assigned, or added to if `accumulate`. Where a log gate is -inf its upstream gradient must be 0, as
/// backward() gives it. Throws as gates() does.
///
///     dw = beta sigmoid(-w) dbeta - sigmoid(w) dlog_alpha       dlog_factor = sum 2 dw
///     de = sigmoid(-2 e) (2 eta deta + 4 dw)
///     db = beta sigmoid(-b) dbeta
///     da = -exp(A_log) sigmoid(a + dt_bias) dlog_alpha          ddt_bias = sum da
///     dm = -exp(Mu_log) sigmoid(m + mu_bias) dlog_mu            dmu_bias = sum dm
///     dA_log = -sum exp(A_log) softplus(a + dt_bias) dlog_alpha, dMu_log alike
template <class Scalar>
void gates_backward(const std::type_identity_t<RawGates<const Scalar>>& raw,
                    const std::type_identity_t<GateParameters<const Scalar>>& parameters,
                    const std::type_identity_t<Gates<const Scalar>>& dy, const RawGates<Scalar>& draw,
                    const std::type_identity_t<GateParameters<Scalar>>& dparameters,
                    const GateOptions& options = {}, bool accumulate = false) {
  const detail::Check check("gates_backward");
  detail::check_gates<Scalar>(check, raw, parameters, options);
  const auto& shape = raw.a.shape;
  check.view("dlog_alpha", dy.log_alpha, shape, "[B, T, HV] of a");
  check.view("dlog_mu", dy.log_mu, shape, "[B, T, HV] of a");
  check.view("dbeta", dy.beta, shape, "[B, T, HV] of a");
  check.view("deta", dy.eta, shape, "[B, T, HV] of a");
  check.view("da", draw.a, shape, "[B, T, HV] of a");
  check.view("db", draw.b, shape, "[B, T, HV] of a");
  check.view("dm", draw.m, shape, "[B, T, HV] of a");
  check.view("de", draw.e, shape, "[B, T, HV] of a");
  detail::Aliases memory(check);
  detail::read_gates<Scalar>(memory, raw, parameters);
  memory.reads("dlog_alpha", dy.log_alpha);
  memory.reads("dlog_mu", dy.log_mu);
  memory.reads("dbeta", dy.beta);
  memory.reads("deta", dy.eta);
  memory.writes("da", draw.a);
  memory.writes("db", draw.b);
  memory.writes("dm", draw.m);
  memory.writes("de", draw.e);
  const auto parameter = [&](const char* name, std::span<Scalar> values) {
    if (Index(values.size()) != shape[2])
      check.fail(name, " has ", values.size(), " elements, not HV = ", shape[2]);
    memory.writes(name, StridedView<Scalar, 1>(values.data(), {shape[2]}));
  };
  parameter("dA_log", dparameters.A_log);
  parameter("ddt_bias", dparameters.dt_bias);
  parameter("dMu_log", dparameters.Mu_log);
  parameter("dmu_bias", dparameters.mu_bias);
  parameter("dlog_factor", dparameters.log_factor);

  for (Index h = 0; h < shape[2]; ++h)
    detail::gates_backward_of_head(raw, parameters, dy, draw, dparameters, options, accumulate, h);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
