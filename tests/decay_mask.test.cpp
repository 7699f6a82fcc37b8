#include <momentum_delta/decay_mask.hpp>

#include <cfenv>
#include <vector>

#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;
using momentum_delta::decay;
using momentum_delta::DecayMask;

template <class Scalar>
struct OwnedMask {
  momentum_delta::Workspace workspace;
  DecayMask<Scalar> mask;

  explicit OwnedMask(Index chunk_size) : mask(make(chunk_size)) {}

 private:
  DecayMask<Scalar> make(Index chunk_size) {
    namespace detail = momentum_delta::detail;
    detail::Arena need;
    static_cast<void>(DecayMask<Scalar>(need, chunk_size));
    detail::Arena arena = detail::Scratch(workspace, 1, need.used()).arena(0);
    return DecayMask<Scalar>(arena, chunk_size);
  }
};

TEMPLATE_TEST_CASE("decay is exactly 0 at -inf and 1 at 0 in every lane", "", float, double, long double) {
  for (Index n = 1; n <= 67; ++n) {  // every vector length with every tail
    for (Index lane = 0; lane < n; ++lane) {
      std::vector<TestType> x(std::size_t(n), TestType(-1)), y(std::size_t(n), TestType(9));
      for (const double special : {-infinity, -1e4, 0.}) {
        x[std::size_t(lane)] = TestType(special);
        momentum_delta::detail::decay_row(x.data(), y.data(), n);
        REQUIRE(y[std::size_t(lane)] == (special == -1e4 ? decay(TestType(-1e4)) : TestType(special == 0)));
        REQUIRE(decay(TestType(special)) == y[std::size_t(lane)]);
        for (Index other = 0; other < n; ++other)
          if (other != lane)
            REQUIRE(std::abs(y[std::size_t(other)] - std::exp(TestType(-1))) < TestType(1e-6));
      }
    }
  }
}

TEMPLATE_TEST_CASE("decay is accurate, and 0 below the smallest normal number", "", float, double) {
  using Limits = std::numeric_limits<TestType>;
  const TestType lowest = std::log(Limits::min());
  std::vector<TestType> x, y;
  for (int i = 0; i <= 1000; ++i) x.push_back(lowest * TestType(i) / 990);
  for (int i = 0; i <= 100; ++i) x.push_back(-lowest * TestType(i) / 101);  // positive log gates
  x.push_back(TestType(1e4));
  y.resize(x.size());
  momentum_delta::detail::decay_row(x.data(), y.data(), Index(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const long double exact = std::exp(static_cast<long double>(x[i]));
    for (const TestType value : {y[i], decay(x[i])}) {
      INFO("x = " << x[i]);
      if (exact > Limits::max())
        CHECK(value == Limits::infinity());
      else if (exact < Limits::min() * (1 - 1e-4L))
        CHECK(value == 0);
      else
        CHECK(std::abs(value - exact) <= Limits::epsilon() * exact);
    }
  }
}

TEMPLATE_TEST_CASE("the mask is the sum of its definition", "", float, double) {
  const Index n = 40;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    Random random(seed);
    std::vector<TestType> log_alpha, log_mu, beta;
    for (Index i = 0; i < n; ++i) {
      log_alpha.push_back(TestType(pick(random, log_gates)));
      log_mu.push_back(TestType(pick(random, log_gates)));
      beta.push_back(TestType(pick(random, rates)));
    }
    const auto at = [](const auto& values) { return [&](Index i) { return values[std::size_t(i)]; }; };
    OwnedMask<TestType> owned(n);
    DecayMask<TestType>& mask = owned.mask;
    std::feclearexcept(FE_ALL_EXCEPT);
    mask.build(n, at(log_alpha), at(log_mu), at(beta));
    CHECK(!std::fetestexcept(FE_INVALID | FE_OVERFLOW | FE_DIVBYZERO));

    // exp of a sum over tokens from + 1 .. to, and G_tj = sum_i (alpha_{i+1}..alpha_t) beta_i
    // (mu_{j+1}..mu_i)
    const auto product = [&](const std::vector<TestType>& logs, Index from, Index to) {
      long double sum = 0;
      for (Index i = from; i < to; ++i) sum += logs[std::size_t(i)];
      return std::exp(sum);
    };
    const auto G = [&](Index t, Index j) {
      long double sum = 0, size = 0;
      for (Index i = std::max<Index>(j, 1); i <= t; ++i) {
        const long double term = product(log_alpha, i, t) * beta[std::size_t(i - 1)] * product(log_mu, j, i);
        sum += term;
        size += std::abs(term);
      }
      return std::pair(sum, size);
    };
    // A sum of up to 40 logs of up to 100 each rounds by up to 40 * 100 eps / 2 where its exponential still
    // counts.
    const double eps = 2e3 * double(std::numeric_limits<TestType>::epsilon());
    const double tiny = double(std::numeric_limits<TestType>::min());
    const auto close = [&](TestType x, std::pair<long double, long double> exact) {
      return std::abs(x - exact.first) <= eps * exact.second + tiny * 50;
    };
    for (Index t = 0; t <= n; ++t) {
      const long double A = product(log_alpha, 0, t), m = product(log_mu, 0, t);
      REQUIRE(close(mask.A(t), {A, A}));
      REQUIRE(close(mask.m(t), {m, m}));
      REQUIRE(close(mask.b(t), G(t, 0)));
      for (Index j = 1; j <= t; ++j) {
        const long double D = product(log_mu, j, t);
        REQUIRE(close(mask.D(t)[j - 1], {D, D}));
        REQUIRE(close(mask.G(t)[j - 1], G(t, j)));
      }
      if (t > 0) {
        REQUIRE(mask.D(t)[t - 1] == 1);
        REQUIRE(mask.G(t)[t - 1] == beta[std::size_t(t - 1)]);
        if (log_mu[std::size_t(t - 1)] == -infinity) {
          REQUIRE(mask.m(t) == 0);
          for (Index j = 1; j < t; ++j) REQUIRE(mask.D(t)[j - 1] == 0);
        }
        if (log_alpha[std::size_t(t - 1)] == -infinity) REQUIRE(mask.A(t) == 0);
      }
    }
  }
}

TEST_CASE("a shorter chunk after a longer one sees nothing of it") {
  const auto gate = [](Index) { return -0.5; };
  const auto rate = [](Index) { return 0.5; };
  OwnedMask<double> reused(37), fresh(20);
  reused.mask.build(37, gate, gate, rate);
  reused.mask.build(20, gate, gate, rate);
  fresh.mask.build(20, gate, gate, rate);
  for (Index t = 0; t <= 20; ++t) {
    CHECK(reused.mask.A(t) == fresh.mask.A(t));
    CHECK(reused.mask.b(t) == fresh.mask.b(t));
    for (Index j = 0; j < (t + 7) / 8 * 8; ++j) {  // whole rows: 0 after the diagonal
      CHECK(reused.mask.D(t)[j] == (j < t ? fresh.mask.D(t)[j] : 0));
      CHECK(reused.mask.G(t)[j] == (j < t ? fresh.mask.G(t)[j] : 0));
    }
  }
}
