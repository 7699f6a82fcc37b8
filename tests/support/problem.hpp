// Random problems, and how far results may be from the oracle.
#pragma once

#include <functional>
#include <limits>

#include "../../examples/kernels/kernels.hpp"
#include "../../examples/support/random.hpp"
#include "oracle.hpp"

namespace test {

using examples::Random;
using momentum_delta::Algorithm;
using momentum_delta::Options;

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// What log_mu and log_alpha are drawn from, independently: no decay, weak, strong, below float's and then
// below anything's smallest number, and an exact reset.
inline constexpr double log_gates[] = {0,  -1e-3, -.01, -.1,  -.25, -.5,      -1,
                                       -2, -5,    -20,  -104, -1e4, -infinity};
inline constexpr double rates[] = {-1, 0, 1e-6, 1, 2};  // beta and eta

template <std::size_t N>
double pick(Random& random, const double (&values)[N]) {
  return values[random.bits() % N];
}

struct Shape {
  Index B = 1, T = 0, HK = 1, HV = 1, K = 5, V = 7;
  bool own_p = false;  // p has a head per value head
};

// A gate's value at token t.
using Gate = std::function<double(Random&, Index t)>;
inline Gate constant(double value) {
  return [=](Random&, Index) { return value; };
}
inline Gate any_log_gate() {
  return [](Random& random, Index) { return pick(random, log_gates); };
}
inline Gate spike(double value, Index at) {
  return [=](Random&, Index t) { return t == at ? value : 0; };
}
inline Gate any_rate() {
  return [](Random& random, Index) { return pick(random, rates); };
}
inline Gate uniform(double lo, double hi) {
  return [=](Random& random, Index) { return random.uniform(lo, hi); };
}

struct Gates {
  Gate log_alpha = uniform(-0.2, 0), log_mu = uniform(-2, 0), beta = uniform(0, 1), eta = uniform(0.5, 1);
};

// visit(gates) for the sweeps: every pair of log gates, each constant, as a spike, and (ignored) drawn anew for
// every token.
template <class Visit>
void for_each_gates(const Visit& visit) {
  for (const double log_alpha : log_gates) {
    for (const double log_mu : log_gates) {
      visit(Gates{constant(log_alpha), constant(log_mu), any_rate(), any_rate()});
      visit(Gates{spike(log_alpha, 20), spike(log_mu, 30), any_rate(), any_rate()});
      visit(Gates{any_log_gate(), any_log_gate(), any_rate(), any_rate()});
    }
  }
}

// Everything present, S_0 and M_0 not zero, every value a float, so that all precisions see the same numbers.
// p is independent of k, and rates may be negative or 2, so a problem may grow. |k| = |p| = 0.3 bounds that:
// where growth is fast, every form's error is a few rounding errors amplified, and the ratio of two such
// numbers says nothing.
inline Problem<double> random_problem(std::uint64_t seed, const Shape& s, const Gates& gates = {},
                                      double norm = 0.3) {
  Random random(seed);
  const auto tokens = [&](Index H, Index D, double length) {
    Array<double> x = examples::zeros<double>({s.B, s.T, H, D});
    for (double& value : x.values) value = random.normal();
    for (std::size_t i = 0; length > 0 && D > 0 && i < x.values.size(); i += std::size_t(D)) {
      double sum = 0;
      for (std::size_t d = i; d < i + std::size_t(D); ++d) sum += x.values[d] * x.values[d];
      for (std::size_t d = i; d < i + std::size_t(D); ++d) x.values[d] *= length / std::sqrt(sum);
    }
    return x;
  };
  const auto gate = [&](const Gate& value) {
    Array<double> x = examples::zeros<double>({s.B, s.T, s.HV});
    for (std::size_t i = 0; i < x.values.size(); ++i) x.values[i] = value(random, Index(i) / s.HV % s.T);
    return x;
  };
  Problem<double> x;
  x.q = tokens(s.HK, s.K, 0);
  x.k = tokens(s.HK, s.K, norm);
  x.v = tokens(s.HV, s.V, 0);
  x.p = tokens(s.own_p ? s.HV : s.HK, s.K, norm);
  x.log_alpha = gate(gates.log_alpha);
  x.log_mu = gate(gates.log_mu);
  x.beta = gate(gates.beta);
  x.eta = gate(gates.eta);
  x.initial_S = x.initial_M = examples::zeros<double>(x.state_shape());
  for (double& value : x.initial_S.values) value = random.normal();
  for (double& value : x.initial_M.values) value = random.normal();
  return x.as<float>().as<double>();
}

inline Options recurrent() {
  return {.algorithm = Algorithm::recurrent};
}
inline Options chunk(Index size) {
  return {.algorithm = Algorithm::chunk, .chunk_size = size};
}

// The definition (RecurrentForward) in the problem's own precision, whatever forward() would choose.
template <class Scalar>
Results<Scalar> definition(const Problem<Scalar>& x) {
  namespace detail = momentum_delta::detail;
  Results<Scalar> y{examples::unwritten<Scalar>(x.v.shape), examples::unwritten<Scalar>(x.state_shape()),
                    examples::unwritten<Scalar>(x.state_shape())};
  detail::forward_with(x.inputs(), y.outputs(), {}, nullptr,
                       [](detail::Arena& arena, const detail::Sizes& sizes, Index columns) {
                         return detail::RecurrentForward<Scalar>(arena, sizes, columns);
                       });
  return y;
}

// Token t of every batch alone: a view of token vectors or gates, or the inputs of a step.
template <class View>
View token_of(View view, Index t) {
  if (view.absent()) return view;
  view.data += t * view.stride[1];
  view.shape[1] = 1;
  return view;
}
template <class Scalar, class Storage>
momentum_delta::Inputs<Scalar, Storage> step_inputs(const momentum_delta::Inputs<Scalar, Storage>& x,
                                                    Index t) {
  return {.q = token_of(x.q, t),
          .k = token_of(x.k, t),
          .v = token_of(x.v, t),
          .p = token_of(x.p, t),
          .log_alpha = token_of(x.log_alpha, t),
          .log_mu = token_of(x.log_mu, t),
          .beta = token_of(x.beta, t),
          .eta = token_of(x.eta, t),
          .scale = x.scale};
}

// rms(x - expected) / max(rms(expected), 1e-30): below that, float has left its range and 0 is right.
template <class Scalar>
double rel_rms(const Array<Scalar>& x, const Array<long double>& expected) {
  long double difference = 0, total = 0;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    const long double d = x.values[i] - expected.values[i];
    difference += d * d;
    total += expected.values[i] * expected.values[i];
  }
  const long double n = std::max<long double>(1, expected.values.size());
  return double(std::sqrt(difference / n) / std::max(std::sqrt(total / n), 1e-30L));
}

// The error a chunk form may have where the recurrence in the same precision has the error `recurrence`: four
// times it, because the two round a different set of intermediates, and 8 epsilon where the recurrence is
// exact by luck.
template <class Scalar>
double budget(double recurrence) {
  return 4 * recurrence + 8 * double(std::numeric_limits<Scalar>::epsilon());
}

// The largest error of o, S and M in units of the budget; above 1 it is exceeded, and a NaN counts as
// infinite.
template <class Scalar>
double worst_ratio(const Results<Scalar>& y, const Results<Scalar>& recurrence,
                   const Results<long double>& exact) {
  double worst = 0;
  const auto tensor = [&](const Array<Scalar>& a, const Array<Scalar>& r, const Array<long double>& e) {
    const double ratio = rel_rms(a, e) / budget<Scalar>(rel_rms(r, e));
    worst = std::isnan(ratio) ? infinity : std::max(worst, ratio);
  };
  tensor(y.o, recurrence.o, exact.o);
  tensor(y.final_S, recurrence.final_S, exact.final_S);
  tensor(y.final_M, recurrence.final_M, exact.final_M);
  return worst;
}

// The largest ratio of a gradient's error to its budget, as a tensor. Gates also element by element,
// saturated ones included: an element's error relative to the size of the terms it is a sum of
// (oracle_backward's `sizes`, which have the factor mu_t or alpha_t). All elements of all gates are alike in
// that measure, so their budget is that of the recurrence's worst one.
template <class Scalar>
double worst_ratio(const Gradients<Scalar>& dx, const Gradients<Scalar>& recurrence,
                   const Gradients<long double>& exact, const Gradients<long double>& sizes) {
  double worst = 0, worst_element = 0, recurrence_element = 0;
  const auto raise = [](double& to, double value) {
    to = std::isnan(value) ? infinity : std::max(to, value);
  };
  Gradients<Scalar>::for_each([&](const char*, auto get, auto) {
    const Array<long double>& e = get(exact);
    if (e.absent()) return;
    raise(worst, rel_rms(get(dx), e) / budget<Scalar>(rel_rms(get(recurrence), e)));
    if (e.shape.size() != 3) return;
    for (std::size_t i = 0; i < e.values.size(); ++i) {
      const long double size = std::max(get(sizes).values[i], 1e-30L);
      raise(worst_element, double(std::abs(get(dx).values[i] - e.values[i]) / size));
      raise(recurrence_element, double(std::abs(get(recurrence).values[i] - e.values[i]) / size));
    }
  });
  raise(worst, worst_element / budget<Scalar>(recurrence_element));
  return worst;
}

// Upstream gradients for a problem, every value a float.
inline Upstream<double> random_upstream(std::uint64_t seed, const Problem<double>& x) {
  Random random(seed ^ 0x5eed);
  Upstream<double> dy{x.v, examples::zeros<double>(x.state_shape()),
                      examples::zeros<double>(x.state_shape())};
  for (auto* a : {&dy.do_, &dy.dfinal_S, &dy.dfinal_M})
    for (double& value : a->values) value = float(random.normal());
  return dy;
}

// Every value the same, NaN like NaN and 0 like -0 (whose sign no later sum can show).
template <class Scalar>
bool equal_values(const Array<Scalar>& a, const Array<Scalar>& b) {
  if (a.shape != b.shape) return false;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    const bool both_nan = std::isnan(a.values[i]) && std::isnan(b.values[i]);
    if (!both_nan && !(a.values[i] == b.values[i])) return false;
  }
  return true;
}
template <class Scalar>
bool equal_values(const Results<Scalar>& a, const Results<Scalar>& b) {
  return equal_values(a.o, b.o) && equal_values(a.final_S, b.final_S) && equal_values(a.final_M, b.final_M);
}
template <class Scalar>
bool equal_values(const Gradients<Scalar>& a, const Gradients<Scalar>& b) {
  bool equal = true;
  Gradients<Scalar>::for_each([&](const char*, auto get, auto) { equal &= equal_values(get(a), get(b)); });
  return equal;
}

}  // namespace test
