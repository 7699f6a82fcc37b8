#include <momentum_delta/gates.hpp>

#include <complex>
#include <functional>

#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;
using momentum_delta::GateOptions;
using momentum_delta::GateParameters;
using momentum_delta::GateView;
using momentum_delta::RawGates;

namespace {

// One token and head: projections, then parameters, in the order of `names`.
constexpr const char* names[] = {"a", "b", "m", "e", "A_log", "dt_bias", "Mu_log", "mu_bias", "log_factor"};
template <class Scalar>
using Point = std::array<Scalar, 9>;
template <class Scalar>
struct Out {
  Scalar log_alpha, log_mu, beta, eta;
};

template <class Scalar>
GateView<Scalar> one(Scalar& x) {
  return {&x, {1, 1, 1}};
}
template <class Scalar>
RawGates<const Scalar> raw(const Point<Scalar>& x) {
  return {one(x[0]), one(x[1]), one(x[2]), one(x[3])};
}
template <class Scalar>
GateParameters<const Scalar> parameters(const Point<Scalar>& x) {
  return {{&x[4], 1}, {&x[5], 1}, {&x[6], 1}, {&x[7], 1}, {&x[8], 1}};
}
template <class Scalar>
Out<Scalar> gates(const Point<Scalar>& x, const GateOptions& options = {}) {
  Out<Scalar> y;
  momentum_delta::gates<Scalar>(raw(x), parameters(x),
                                {one(y.log_alpha), one(y.log_mu), one(y.beta), one(y.eta)}, options);
  return y;
}
template <class Scalar>
Point<Scalar> gradients(const Point<Scalar>& x, const Out<Scalar>& dy, const GateOptions& options = {}) {
  Point<Scalar> d;
  d.fill(std::numeric_limits<Scalar>::quiet_NaN());
  momentum_delta::gates_backward<Scalar>(
      raw(x), parameters(x), {one(dy.log_alpha), one(dy.log_mu), one(dy.beta), one(dy.eta)},
      {one(d[0]), one(d[1]), one(d[2]), one(d[3])},
      {{&d[4], 1}, {&d[5], 1}, {&d[6], 1}, {&d[7], 1}, {&d[8], 1}}, options);
  return d;
}

// The formulas as they are published, where nothing in them overflows.
Out<long double> published(const Point<long double>& x) {
  const auto sigmoid = [](long double v) { return 1 / (1 + std::exp(-v)); };
  const auto softplus = [](long double v) { return std::log1p(std::exp(v)); };
  const long double eta = 1 + std::tanh(x[3]), theta = std::atan(eta * std::exp(x[8]));
  const long double sine = std::sin(theta), cosine = std::cos(theta);
  return {std::log(cosine * cosine) - std::exp(x[4]) * softplus(x[0] + x[5]),
          -std::exp(x[6]) * softplus(x[2] + x[7]), sine * sine * sigmoid(x[1]), eta};
}

// Multiples of 2^-16, the same number in every type. (Not rounded through float: g++ 12.2 with AVX-512 leaves
// that out when it vectorises the loop.)
template <class Scalar>
Point<Scalar> random_point(Random& random, double size) {
  Point<Scalar> x;
  for (Scalar& value : x) value = Scalar(std::round(random.uniform(-size, size) * 0x1p16)) / Scalar(0x1p16);
  return x;
}

// The larger eigenvalue's modulus of [[mu, eta alpha_p], [-beta mu, alpha - beta eta alpha_p]]: how a written
// key's (M, S) goes on, with p = alpha_p k.
double spectral_radius(double alpha, double mu, double beta, double eta, double alpha_p) {
  const double trace = mu + alpha - beta * eta * alpha_p, determinant = mu * alpha;
  const std::complex<double> root = std::sqrt(std::complex<double>(trace * trace / 4 - determinant));
  return std::max(std::abs(trace / 2 + root), std::abs(trace / 2 - root));
}

constexpr double extremes[] = {-3e38, -1e4, -100, -20, -1, -1e-3, 0, 1e-3, 1, 20, 100, 1e4, 3e38};

}  // namespace

TEMPLATE_TEST_CASE("the gates are the published formulas", "", float, double) {
  Random random(1);
  const double eps = std::numeric_limits<TestType>::epsilon();
  for (int i = 0; i < 2000; ++i) {
    const Point<TestType> x = random_point<TestType>(random, 4);
    Point<long double> wide;
    std::copy(x.begin(), x.end(), wide.begin());
    const Out<TestType> y = gates(x);
    const Out<long double> exact = published(wide);
    // w = log z^2 has a few roundings of its own size, up to 20 here.
    CHECK(std::abs(y.log_alpha - exact.log_alpha) <= 40 * eps * std::abs(exact.log_alpha));
    CHECK(std::abs(y.log_mu - exact.log_mu) <= 16 * eps * std::abs(exact.log_mu));
    CHECK(std::abs(y.beta - exact.beta) <= 40 * eps * exact.beta);
    CHECK(std::abs(y.eta - exact.eta) <= 16 * eps * exact.eta);
  }
}

TEST_CASE("the gradients of the gates") {
  Random random(2);
  const long double h = 1e-4L;
  for (const bool negative : {false, true}) {
    const GateOptions options{.min_log_mu = -3.0, .allow_neg_eigval = negative};
    int raised = 0;
    for (int sample = 0; sample < 200; ++sample) {
      const Point<long double> x = random_point<long double>(random, 3);
      const Out<long double> dy{random.normal(), random.normal(), random.normal(), random.normal()};
      if (std::abs(gates(x).log_mu + 3) < 0.01L) continue;  // has a kink there
      raised += gates(x, options).log_mu == -3;
      const Point<long double> d = gradients(x, dy, options);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const auto f = [&](long double step) {
          Point<long double> moved = x;
          moved[i] += step;
          const Out<long double> y = gates(moved, options);
          return dy.log_alpha * y.log_alpha + dy.log_mu * y.log_mu + dy.beta * y.beta + dy.eta * y.eta;
        };
        const long double slope = (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h);
        INFO(names[i]);
        CHECK(std::abs(d[i] - slope) <= 1e-10L * std::max(1.L, std::abs(slope)));
      }
    }
    CHECK(raised > 5);
  }
}

TEMPLATE_TEST_CASE("every finite projection and parameter has gates in their range, and finite gradients", "",
                   float, double) {
  Random random(3);
  for (int sample = 0; sample < 20000; ++sample) {
    Point<TestType> x;
    for (TestType& value : x) value = TestType(pick(random, extremes));
    const Out<TestType> y = gates(x);
    const bool in_range =
        y.log_alpha <= 0 && y.log_mu <= 0 && y.beta >= 0 && y.beta <= 1 && y.eta >= 0 && y.eta <= 2;
    const Out<TestType> dy{std::isinf(y.log_alpha) ? TestType(0) : std::exp(y.log_alpha),
                           std::isinf(y.log_mu) ? TestType(0) : std::exp(y.log_mu), TestType(1),
                           TestType(-1)};
    bool finite = true;
    for (const TestType d : gradients(x, dy)) finite = finite && std::isfinite(d);
    if (in_range && finite) continue;
    INFO(x[0] << " " << x[1] << " " << x[2] << " " << x[3] << " parameters " << x[4] << " " << x[5] << " "
              << x[6] << " " << x[7] << " " << x[8]);
    CHECK(in_range);
    CHECK(finite);
  }
}

TEST_CASE("a rate whose two factors leave the range is still right") {
  // exp(200) softplus(-202) = exp(-2) (1 - ..); alone they are inf and 0 in float.
  Point<float> x{};
  x[4] = 200;
  x[0] = -202;
  x[3] = -1e4f;  // z = 0
  CHECK(std::abs(gates(x).log_alpha + std::exp(-2.f)) <= 1e-5f);
  const Point<float> d = gradients(x, {1, 0, 0, 0});
  CHECK(std::abs(d[0] + std::exp(-2.f)) <= 1e-5f);
  CHECK(d[4] == d[0]);
  CHECK(d[5] == d[0]);
}

TEST_CASE("with p = alpha k every one-key mode stays inside the unit circle") {
  Random random(4);
  const double values[] = {-1e4, -30, -8, -4, -2, -1, -.5, -.1, 0, .1, .5, 1, 2, 4, 8, 30, 1e4};
  double worst_with_k = 0, worst_sum = 0, worst_neg = 0;
  for (int sample = 0; sample < 200000; ++sample) {
    Point<double> x;
    for (double& value : x) value = pick(random, values);
    const Out<double> y = gates(x);
    const double alpha = std::exp(y.log_alpha), mu = std::exp(y.log_mu);
    const double radius = spectral_radius(alpha, mu, y.beta, y.eta, alpha);
    if (radius > 1 + 1e-7) CHECK(radius <= 1 + 1e-7);  // a double eigenvalue has half the digits
    if (alpha < 0.99 && mu < 0.99 && radius >= 1) CHECK(radius < 1);
    CHECK_FALSE(alpha * y.beta * y.eta > 0.5 + 1e-12);
    worst_with_k = std::max(worst_with_k, spectral_radius(alpha, mu, y.beta, y.eta, 1));
    const Out<double> doubled = gates(x, {.allow_neg_eigval = true});
    worst_sum = std::max(worst_sum, alpha + doubled.beta);
    CHECK(doubled.beta == 2 * y.beta);
    worst_neg = std::max(worst_neg, doubled.beta * doubled.eta);
  }
  CHECK(worst_with_k > 1.9);  // p = k is not safe: beta eta reaches 2
  CHECK(worst_sum > 1.2);     // nor does alpha + beta <= 1 hold with beta doubled
  CHECK(worst_neg > 3.9);     // whose 1 - beta eta is negative
}

TEST_CASE("the gates refuse what they cannot use, and name it") {
  Point<double> x{}, y{};
  const auto refused = [&](const std::function<void()>& call, const std::string& why) {
    try {
      call();
      FAIL("accepted: " << why);
    } catch (const std::invalid_argument& e) {
      INFO(e.what());
      CHECK(std::string(e.what()).find(why) != std::string::npos);
    }
  };
  const momentum_delta::Gates<double> out{one(y[0]), one(y[1]), one(y[2]), one(y[3])};
  y.fill(7);
  const auto run = [&](const RawGates<const double>& r, const GateParameters<const double>& p,
                       const GateOptions& options = {}) {
    momentum_delta::gates<double>(r, p, out, options);
  };
  for (std::size_t i = 0; i < 4; ++i) {
    Point<double> bad = x;
    bad[i] = infinity;
    refused([&] { run(raw(bad), parameters(bad)); },
            std::string("gates: ") + names[i] + "[0, 0, 0] = inf is infinite");
    RawGates<const double> missing = raw(x);
    (i == 0 ? missing.a : i == 1 ? missing.b : i == 2 ? missing.m : missing.e) = {};
    refused([&] { run(missing, parameters(x)); }, std::string(names[i]) + " is missing");
  }
  for (std::size_t i = 4; i < 9; ++i) {
    Point<double> bad = x;
    bad[i] = -infinity;
    refused([&] { run(raw(bad), parameters(bad)); }, std::string(names[i]) + "[0] = -inf is not finite");
    GateParameters<const double> none = parameters(x);
    (i == 4   ? none.A_log
     : i == 5 ? none.dt_bias
     : i == 6 ? none.Mu_log
     : i == 7 ? none.mu_bias
              : none.log_factor) = {};
    refused([&] { run(raw(x), none); }, std::string(names[i]) + " has 0 elements, not HV = 1");
  }
  refused([&] { run(raw(x), parameters(x), {.min_log_mu = 0.5}); },
          "options.min_log_mu = 0.5 is not in [-inf, 0]");
  refused(
      [&] {
        momentum_delta::gates<double>(raw(x), parameters(x), {one(x[0]), out.log_mu, out.beta, out.eta});
      },
      "log_alpha shares memory with a");
  refused(
      [&] {
        momentum_delta::gates<double>(raw(x), parameters(x), {{}, out.log_mu, out.beta, out.eta});
      },
      "log_alpha is missing");
  const Out<double> dy{};
  const auto back = [&](const RawGates<const double>& r, double& draw_a) {
    momentum_delta::gates_backward<double>(r, parameters(x),
                                           {one(dy.log_alpha), one(dy.log_mu), one(dy.beta), one(dy.eta)},
                                           {one(draw_a), one(y[1]), one(y[2]), one(y[3])},
                                           {{&y[4], 1}, {&y[5], 1}, {&y[6], 1}, {&y[7], 1}, {&y[8], 1}});
  };
  Point<double> bad = x;
  bad[1] = infinity;
  refused([&] { back(raw(bad), y[0]); }, "gates_backward: b[0, 0, 0] = inf is infinite");
  refused([&] { back(raw(x), x[2]); }, "da shares memory with m");
  CHECK(y == Point<double>{7, 7, 7, 7, 7, 7, 7, 7, 7});
}
