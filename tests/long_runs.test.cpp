// Ten million tokens, in stretches with the state carried: states stay finite, errors stay within the
// budget and do not grow with the run, and no kind of gates is slow, as subnormal numbers would be.
#include <chrono>
#include <numbers>

#include "support/catch.hpp"
#include "support/problem.hpp"
#include "support/sanitizer.hpp"
#include "support/scan.hpp"

using namespace test;
using momentum_delta::GateView;
using momentum_delta::Inputs;
using momentum_delta::Outputs;
using momentum_delta::ScanInputs;
using momentum_delta::StateView;
using momentum_delta::TokenView;
using momentum_delta::Workspace;

namespace {

constexpr Index K = 16, V = 16, stretch = Index(1) << 16;
constexpr double eps = double(std::numeric_limits<float>::epsilon());

// -10^a, a uniform in [lo, hi].
Gate log_uniform(double lo, double hi) {
  return [=](Random& random, Index) { return -std::pow(10., random.uniform(lo, hi)); };
}
// One of them, anew for every token.
Gate any_of(std::vector<Gate> gates) {
  return [=](Random& random, Index t) { return gates[random.bits() % gates.size()](random, t); };
}
Gate sometimes(double value, Index every, const Gate& else_) {
  return [=](Random& random, Index t) {
    return random.bits() % std::uint64_t(every) == 0 ? value : else_(random, t);
  };
}

struct Kind {
  const char* name;
  Gates gates;
  Index tokens;
};

// The rule is stable in all of them. With p = k, |k| = 1 and c = beta eta: where mu is at most 1/2 it
// contracts along every key, c < (1 + alpha) (1 + mu) (gates.hpp). Where alpha and mu are both near 1, random
// keys drive the pair (M, S) like a spring of random stiffness, so that it grows: by c / 8 a token or so. The
// decays take (log_alpha + log_mu) / 2 from that, 1.4e-5 in the mean, hence c <= 2^-16.
const Gate weak = log_uniform(-7, -4), strong = uniform(-104, -20), ordinary = uniform(-2, -0.7);
const Gate small = uniform(0.5 / 256, 1. / 256), rate = uniform(0.3, 1);
#if defined(__OPTIMIZE__) && !defined(TEST_SANITIZER)
constexpr bool at_speed = true;
#else
constexpr bool at_speed = false;
#endif
constexpr Index long_run = at_speed ? 10'000'000 : 4 * stretch, short_run = at_speed ? 16 * stretch : stretch;
const Kind kinds[] = {
    {"ordinary", {uniform(-0.2, 0), ordinary, rate, rate}, short_run},
    {"both near 1", {weak, weak, small, small}, long_run},
    {"alpha near 1", {weak, ordinary, rate, rate}, short_run},
    {"both near 0", {strong, strong, rate, rate}, short_run},
    {"mu near 0", {uniform(-0.2, 0), strong, rate, rate}, short_run},
    {"alpha 1", {constant(0), ordinary, rate, rate}, short_run},
    {"mu 0", {uniform(-0.2, 0), constant(-infinity), rate, rate}, short_run},
    {"resets", {sometimes(-infinity, 1000, weak), sometimes(-infinity, 1000, weak), small, small}, short_run},
    {"mixed",
     {any_of({weak, strong, constant(0), sometimes(-infinity, 30, ordinary)}),
      any_of({ordinary, strong, constant(-infinity)}), rate, rate},
     long_run}};

// Tokens enough for a stretch from any of the first `stretch` on; gates of one stretch.
template <class Scalar>
struct Tokens {
  std::vector<Scalar> q, k, v, gates[4];

  void draw_gates(std::uint64_t seed, const Gates& g) {
    Random random(seed);
    const Gate* const each[] = {&g.log_alpha, &g.log_mu, &g.beta, &g.eta};
    for (int i = 0; i < 4; ++i) {
      gates[i].resize(std::size_t(stretch));
      for (Index t = 0; t < stretch; ++t) gates[i][std::size_t(t)] = Scalar(float((*each[i])(random, t)));
    }
  }
  template <class To>
  Tokens<To> as() const {
    const auto copy = [](const std::vector<Scalar>& x) { return std::vector<To>(x.begin(), x.end()); };
    return {copy(q), copy(k), copy(v), {copy(gates[0]), copy(gates[1]), copy(gates[2]), copy(gates[3])}};
  }
};

Tokens<float> random_tokens(std::uint64_t seed) {
  Tokens<float> x;
  Random random(seed);
  for (Index t = 0; t < 2 * stretch; ++t) {
    double sum = 0;
    for (Index i = 0; i < K; ++i) {
      x.q.push_back(float(random.normal()));
      x.k.push_back(float(random.normal()));
      sum += double(x.k.back()) * x.k.back();
    }
    for (Index i = 0; i < K; ++i) x.k[std::size_t(t * K + i)] /= float(std::sqrt(sum));
    for (Index j = 0; j < V; ++j) x.v.push_back(float(random.normal()));
  }
  return x;
}

template <class Scalar>
void define(const Inputs<Scalar>& x, const Outputs<Scalar>& y) {
  namespace detail = momentum_delta::detail;
  detail::forward_with(x, y, {}, nullptr,
                       [](detail::Arena& arena, const detail::Sizes& sizes, Index columns) {
                         return detail::RecurrentForward<Scalar>(arena, sizes, columns);
                       });
}

// One run, a stretch at a time: by forward(), or by the definition in Scalar.
template <class Scalar>
class Run {
 public:
  explicit Run(const Options& options) : options_(options) {}
  Run() : by_definition_(true) {}

  const std::vector<Scalar>& operator()(const Tokens<Scalar>& x, Index first, Index count) {
    const auto rows = [&](const std::vector<Scalar>& from, Index D) {
      return TokenView<const Scalar>(from.data() + first * D, {1, count, 1, D});
    };
    const auto gate = [&](int i) { return GateView<const Scalar>(x.gates[i].data(), {1, count, 1}); };
    const StateView<Scalar> S_view(S.data(), {1, 1, K, V}), M_view(M.data(), {1, 1, K, V});
    o.resize(std::size_t(count * V));
    const Inputs<Scalar> in{.q = rows(x.q, K),
                            .k = rows(x.k, K),
                            .v = rows(x.v, V),
                            .log_alpha = gate(0),
                            .log_mu = gate(1),
                            .beta = gate(2),
                            .eta = gate(3),
                            .initial_S = S_view,
                            .initial_M = M_view};
    const Outputs<Scalar> out{.o = {o.data(), {1, count, 1, V}}, .final_S = S_view, .final_M = M_view};
    options_.workspace = &workspace_;
    if (by_definition_)
      define(in, out);
    else
      momentum_delta::forward(in, out, options_);
    return o;
  }

  std::vector<Scalar> S = std::vector<Scalar>(K * V), M = S, o;

 private:
  Options options_{};
  bool by_definition_ = false;
  Workspace workspace_;
};

template <class Scalar>
bool finite(const std::vector<Scalar>& x) {
  return std::all_of(x.begin(), x.end(), [](Scalar value) { return std::isfinite(value); });
}

double error(const std::vector<float>& x, const std::vector<double>& exact) {
  double difference = 0, total = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - exact[i]) * (x[i] - exact[i]);
    total += exact[i] * exact[i];
  }
  return std::sqrt(difference / total);
}

}  // namespace

// The forms are compared with the definition in float. A token rounds S and M a few times, by eps / 2 at most
// relative to themselves, and the decays of both by as much; the rule forgets what is L tokens old, 7e4 in
// the mean of weak gates and a few tokens otherwise. So the error is the sum of what at most L tokens leave,
// with random signs: in the order of sqrt(L) eps = 3e-5, of which ten times are allowed, however long the run
// is. Later stretches have no more than twice the largest error of the first quarter, which is many L long.
TEST_CASE("ten million tokens") {
  const Tokens<float> tokens = random_tokens(1);
  const Tokens<double> exact_tokens = tokens.as<double>();
  for (const Kind& kind : kinds) {
    Tokens<float> x = tokens;
    Tokens<double> exact_x = exact_tokens;
    Run<float> definition, recurrence(recurrent()), chunks(chunk(16));
    Run<double> reference(recurrent());
    Random random(2);
    double errors[3] = {}, first_errors = 0, later_errors = 0, worst_ratio = 0;
    bool all_finite = true;
    const Index stretches = (kind.tokens + stretch - 1) / stretch;
    for (Index n = 0; n < stretches; ++n) {
      x.draw_gates(std::uint64_t(n), kind.gates);
      for (int i = 0; i < 4; ++i) exact_x.gates[i].assign(x.gates[i].begin(), x.gates[i].end());
      const Index first = Index(random.bits() % std::uint64_t(stretch));
      const std::vector<double>& exact = reference(exact_x, first, stretch);
      const double by_definition = error(definition(x, first, stretch), exact);
      const double forms[] = {by_definition, error(recurrence(x, first, stretch), exact),
                              error(chunks(x, first, stretch), exact)};
      for (int i = 0; i < 3; ++i) {
        errors[i] = std::max(errors[i], forms[i]);
        worst_ratio = std::max(worst_ratio, forms[i] / budget<float>(by_definition));
        double& largest = 4 * n < stretches ? first_errors : later_errors;
        largest = std::max(largest, forms[i]);
      }
      for (const auto* state : {&definition.S, &recurrence.S, &recurrence.M, &chunks.S, &chunks.M})
        all_finite &= finite(*state);
    }
    INFO(kind.name);
    WARN(kind.name << ": errors of the definition " << errors[0] << ", recurrence " << errors[1]
                   << ", chunk form " << errors[2] << "; largest ratio to the budget " << worst_ratio);
    CHECK(all_finite);
    CHECK(worst_ratio <= 1);
    CHECK(first_errors <= 10 * 3e-5);
    if (at_speed) CHECK(later_errors <= 2 * first_errors);  // else the first quarter is too short
  }
}

// The time of a stretch by each kind of gates, the least of several interleaved ones, is at most half as much
// again as with ordinary gates. (Where decays leave the scalars of the recurrence, each token multiplies the
// state by them: that is within the half.) `fading` writes once, and then lets the state decay to nothing.
TEST_CASE("no kind of gates is slow") {
  if (!at_speed) {
    WARN("not timed: built without optimisation, or with a sanitizer");
    return;
  }
  using Clock = std::chrono::steady_clock;
  constexpr Index count = 4096;
  std::vector<Kind> all(std::begin(kinds), std::end(kinds));
  for (const double log_alpha : {-0.01, -0.1, -1.})
    all.push_back({"fading", {constant(log_alpha), constant(log_alpha), constant(1), spike(1, 0)}, count});
  std::vector<Tokens<float>> x(all.size(), random_tokens(1));
  for (std::size_t i = 0; i < all.size(); ++i) x[i].draw_gates(1, all[i].gates);
  for (const Options& form : {recurrent(), chunk(16)}) {
    std::vector<Run<float>> runs(all.size(), Run<float>(form));
    std::vector<double> least(all.size(), infinity);
    for (int repeat = 0; repeat < 15; ++repeat) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto begin = Clock::now();
        runs[i](x[i], 0, count);
        least[i] = std::min(least[i], std::chrono::duration<double>(Clock::now() - begin).count());
      }
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      INFO("algorithm " << int(form.algorithm) << ", " << all[i].name << ": " << least[i] / count * 1e9
                        << " ns a token, " << least[i] / least[0] << " of ordinary");
      CHECK(least[i] <= 1.5 * least[0]);
    }
  }
}

namespace {

template <class Scalar>
struct ScanTokens {
  std::vector<Scalar> u, delta, A, B, C;  // delta: of one stretch

  template <class To>
  ScanTokens<To> as() const {
    const auto copy = [](const std::vector<Scalar>& x) { return std::vector<To>(x.begin(), x.end()); };
    return {copy(u), copy(delta), copy(A), copy(B), copy(C)};
  }
};

template <class Scalar>
class ScanRun {
 public:
  static constexpr Index D = 8, N = 4;
  explicit ScanRun(const ScanOptions& options) : options_(options) {}

  const std::vector<Scalar>& operator()(const ScanTokens<Scalar>& x, Index first, Index count) {
    using momentum_delta::ArrayView;
    const auto tokens = [&](const std::vector<Scalar>& from, Index begin) {
      return ArrayView<const Scalar, 3>(from.data() + begin * D, {1, count, D});
    };
    const auto groups = [&](const std::vector<Scalar>& from) {
      return TokenView<const Scalar>(from.data() + first * N, {1, count, 1, N});
    };
    const ArrayView<Scalar, 3> state_view(state.data(), {1, D, N});
    out.resize(std::size_t(count * D));
    options_.workspace = &workspace_;
    momentum_delta::scan_forward(ScanInputs<Scalar>{.u = tokens(x.u, first),
                                                    .delta = tokens(x.delta, 0),
                                                    .A = {x.A.data(), {D, N}},
                                                    .B = groups(x.B),
                                                    .C = groups(x.C),
                                                    .initial_state = state_view,
                                                    .delta_softplus = false},
                                 {.out = {out.data(), {1, count, D}}, .final_state = state_view}, options_);
    return out;
  }

  std::vector<Scalar> state = std::vector<Scalar>(D * N), out;

 private:
  ScanOptions options_;
  Workspace workspace_;
};

struct Steps {
  const char* name;
  double lo, hi;  // of log10 dt
};
void draw_steps(std::uint64_t seed, const Steps& steps, std::vector<float>& delta) {
  Random random(seed);
  delta.resize(std::size_t(stretch * ScanRun<float>::D));
  const float lo = float(steps.lo * std::numbers::ln10), hi = float(steps.hi * std::numbers::ln10);
  for (float& dt : delta) dt = std::exp(lo + (hi - lo) * float(random.uniform()));
}

// A from -1e-3 to -1e3, another for every state.
ScanTokens<float> random_scan_tokens(std::uint64_t seed) {
  constexpr Index D = ScanRun<float>::D, N = ScanRun<float>::N;
  ScanTokens<float> x;
  Random random(seed);
  const auto normal = [&](std::vector<float>& to, Index count) {
    for (Index i = 0; i < count; ++i) to.push_back(float(random.normal()));
  };
  normal(x.u, 2 * stretch * D);
  normal(x.B, 2 * stretch * N);
  normal(x.C, 2 * stretch * N);
  for (Index i = 0; i < D * N; ++i) x.A.push_back(-std::pow(10.f, 6 * float(i) / float(D * N - 1) - 3));
  return x;
}

constexpr Steps steps[] = {{"ordinary", -2, 0}, {"all", -6, 3}, {"short", -6, -4}, {"long", 1, 3}};

}  // namespace

// A state forgets after 1 / (dt |A|) tokens, and each of them multiplies it by a decay that is off by 3 eps
// at most, as in the sweep of dt and A: 3 eps times the tokens that the slowest A, 1e-3, remembers. (It is
// reached where all round alike: the decays of "short" steps are 1 - 2e-8 in the mean, which float rounds
// to 1.)
TEST_CASE("ten million tokens of the selective scan") {
  const ScanTokens<float> tokens = random_scan_tokens(1);
  const ScanTokens<double> exact_tokens = tokens.as<double>();
  for (const Steps& kind : steps) {
    ScanTokens<float> x = tokens;
    ScanTokens<double> exact_x = exact_tokens;
    ScanRun<float> recurrence(scan_recurrent()), chunks(scan_chunk(64));
    ScanRun<double> reference(scan_recurrent());
    Random random(2);
    double worst_error = 0, worst_ratio = 0;
    bool all_finite = true;
    const Index count = kind.lo == -6 && kind.hi == 3 ? long_run : short_run;
    const double mean =
        (std::pow(10., kind.hi) - std::pow(10., kind.lo)) / ((kind.hi - kind.lo) * std::numbers::ln10);
    const double remembered = std::min(double(count), 1 + 1 / (mean * 1e-3));
    for (Index n = 0; n < (count + stretch - 1) / stretch; ++n) {
      draw_steps(std::uint64_t(n), kind, x.delta);
      exact_x.delta.assign(x.delta.begin(), x.delta.end());
      const Index first = Index(random.bits() % std::uint64_t(stretch));
      const std::vector<double>& exact = reference(exact_x, first, stretch);
      const double e = error(recurrence(x, first, stretch), exact);
      const double e_chunks = error(chunks(x, first, stretch), exact);
      worst_error = std::max(worst_error, e);
      worst_ratio = std::max(worst_ratio, e_chunks / budget<float>(e));
      for (const auto* state : {&recurrence.state, &chunks.state}) all_finite &= finite(*state);
    }
    INFO(kind.name);
    WARN(kind.name << ": error " << worst_error << ", chunk form in units of its budget " << worst_ratio);
    CHECK(all_finite);
    CHECK(worst_ratio <= 1);
    CHECK(worst_error <= 3 * eps * remembered);
  }
}

TEST_CASE("no kind of steps is slow") {
  if (!at_speed) {
    WARN("not timed: built without optimisation, or with a sanitizer");
    return;
  }
  using Clock = std::chrono::steady_clock;
  constexpr Index count = 4096;
  constexpr std::size_t kind_count = std::size(steps);
  std::vector<ScanTokens<float>> x(kind_count, random_scan_tokens(1));
  for (std::size_t i = 0; i < kind_count; ++i) draw_steps(1, steps[i], x[i].delta);
  for (const ScanOptions& form : {scan_recurrent(), scan_chunk(64)}) {
    std::vector<ScanRun<float>> runs(kind_count, ScanRun<float>(form));
    std::vector<double> least(kind_count, infinity);
    for (int repeat = 0; repeat < 15; ++repeat) {
      for (std::size_t i = 0; i < kind_count; ++i) {
        const auto begin = Clock::now();
        runs[i](x[i], 0, count);
        least[i] = std::min(least[i], std::chrono::duration<double>(Clock::now() - begin).count());
      }
    }
    for (std::size_t i = 0; i < kind_count; ++i) {
      INFO("algorithm " << int(form.algorithm) << ", " << steps[i].name << ": " << least[i] / count * 1e9
                        << " ns a token, " << least[i] / least[0] << " of ordinary");
      CHECK(least[i] <= 1.5 * least[0]);
    }
  }
}

// More seeds than sweep.test.cpp and backward.test.cpp have.
TEMPLATE_TEST_CASE("the sweeps of gates with more seeds", "", float, double) {
  double worst = 0, worst_gradient = 0;
  for (std::uint64_t seed = 1001; seed <= 1500; ++seed) {
    const Problem<double> x =
        random_problem(seed, {.T = 133}, {any_log_gate(), any_log_gate(), any_rate(), any_rate()});
    const Results<long double> exact = oracle(x);
    const Problem<TestType> xs = x.as<TestType>();
    const Results<TestType> r = definition(xs);
    worst = std::max(worst, worst_ratio(examples::run(xs, recurrent()), r, exact));
    for (const Index C : {3, 16, 64})
      worst = std::max(worst, worst_ratio(examples::run(xs, chunk(C)), r, exact));
    if (seed % 5 != 0) continue;
    const Upstream<double> dy = random_upstream(seed, x);
    Gradients<long double> sizes;
    const Gradients<long double> exact_dx = oracle_backward(x, dy, &sizes);
    const auto run = [&](const Options& options) {
      return examples::run_backward(xs, dy.as<TestType>(), options);
    };
    const Gradients<TestType> dr = run(recurrent());
    for (const Index C : {3, 16, 64})
      worst_gradient = std::max(worst_gradient, worst_ratio(run(chunk(C)), dr, exact_dx, sizes));
  }
  WARN("worst ratio to the budget: " << worst << ", of gradients " << worst_gradient);
  CHECK(worst <= 1);
  CHECK(worst_gradient <= 1);
}
