// What must hold whatever the numbers are.
#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;
using examples::run;

namespace {

std::vector<Options> forms() {
  return {recurrent(), chunk(1), chunk(2), chunk(3), chunk(16), chunk(64)};
}

// Tokens [begin, end) of a problem with B = 1, its state taken from `state`.
template <class Scalar>
Problem<Scalar> slice(const Problem<Scalar>& x, Index begin, Index end, const Results<Scalar>& state) {
  const auto cut = [&](const Array<Scalar>& a) {
    if (a.absent()) return a;
    Array<Scalar> part{a.shape, {}};
    part.shape[1] = end - begin;
    const Index row = Index(a.values.size()) / a.shape[1];
    part.values.assign(a.values.begin() + begin * row, a.values.begin() + end * row);
    return part;
  };
  return {cut(x.q),   cut(x.k),      cut(x.v),      cut(x.p), cut(x.log_alpha), cut(x.log_mu), cut(x.beta),
          cut(x.eta), state.final_S, state.final_M, {},       x.scale};
}

template <class Scalar>
Array<Scalar> first_tokens(const Array<Scalar>& a, Index count) {
  Array<Scalar> part = a;
  part.shape[1] = count;
  part.values.resize(a.values.size() / std::size_t(a.shape[1]) * std::size_t(count));
  return part;
}

template <class Scalar>
Results<Scalar> initial(const Problem<Scalar>& x) {
  return {{}, x.initial_S, x.initial_M};
}

}  // namespace

TEMPLATE_TEST_CASE("every length around the chunk size", "", float, double) {
  double worst = 0;
  for (const Index C : {1, 2, 3, 16, 64}) {
    for (const Index T : {Index(1), Index(2), C - 1, C, C + 1, 2 * C, 2 * C + 1, 3 * C + 5}) {
      const Problem<double> x = random_problem(std::uint64_t(100 * C + T), {.T = T});
      const Problem<TestType> xs = x.as<TestType>();
      const Results<TestType> y = run(xs, chunk(C));
      if (T == 0) {  // nothing happens, exactly
        CHECK(equal_values(y.final_S, xs.initial_S));
        CHECK(equal_values(y.final_M, xs.initial_M));
        CHECK(equal_values(run(xs, recurrent()), y));
        continue;
      }
      worst = std::max(worst, worst_ratio(y, definition(xs), oracle(x)));
      worst = std::max(worst, worst_ratio(run(xs, recurrent()), definition(xs), oracle(x)));
    }
  }
  CHECK(worst <= 1);
}

TEMPLATE_TEST_CASE("every K and V, several heads and batches", "", float, double) {
  double worst = 0;
  for (const Index K : {1, 3, 7, 16, 17, 63, 64, 65, 100, 128}) {
    for (const Index V : {1, 7, 17, 64, 65, 128}) {
      const Problem<double> x = random_problem(std::uint64_t(1000 * K + V), {.T = 37, .K = K, .V = V});
      const Problem<TestType> xs = x.as<TestType>();
      for (const Options& options : {recurrent(), chunk(3), chunk(16), chunk(64)})
        worst = std::max(worst, worst_ratio(run(xs, options), definition(xs), oracle(x)));
    }
  }
  const Problem<double> primes = random_problem(1, {.B = 2, .T = 11, .HK = 3, .HV = 3, .K = 5, .V = 7});
  const Problem<TestType> primes_s = primes.as<TestType>();
  for (const Options& options : forms())
    worst = std::max(worst, worst_ratio(run(primes_s, options), definition(primes_s), oracle(primes)));
  CHECK(worst <= 1);
}

// The recurrence plans 512 tokens at a time and applies decay when it has collected to 1e-8 or 1e8.
TEMPLATE_TEST_CASE("long sequences, and decays that fold up and down", "", float, double) {
  double worst = 0;
  for (const Index T : {511, 512, 513, 1100}) {
    for (const double log_gate : {-1e-4, -0.02, -0.7, -20.}) {
      const Problem<double> x =
          random_problem(std::uint64_t(T), {.T = T, .V = 20}, {constant(log_gate), constant(log_gate)});
      const Problem<TestType> xs = x.as<TestType>();
      for (const Options& options : {recurrent(), chunk(64)})
        worst = std::max(worst, worst_ratio(run(xs, options), definition(xs), oracle(x)));
    }
  }
  // S grows by e a token, through 1e8 and beyond; M, on its own, by e^0.5.
  const Problem<double> x = random_problem(1, {.T = 40}, {constant(1), constant(0.5), uniform(0, 1e-3)});
  const Problem<TestType> xs = x.as<TestType>();
  REQUIRE(std::abs(oracle(x).final_S.values[0]) > 1e10L);
  for (Options options : {recurrent(), chunk(16)}) {
    options.allow_positive_log_gates = true;
    worst = std::max(worst, worst_ratio(run(xs, options), definition(xs), oracle(x)));
  }
  CHECK(worst <= 1);
}

TEST_CASE("sizes of zero") {
  for (const Shape& s : {Shape{.T = 4, .K = 0, .V = 3}, Shape{.T = 4, .K = 3, .V = 0}, Shape{.B = 0, .T = 4},
                         Shape{.T = 4, .HK = 0, .HV = 0}}) {
    const Problem<double> x = random_problem(1, s);
    for (const Options& options : forms()) {
      const Results<double> y = run(x, options);
      for (const double value : y.o.values)
        CHECK(value == 0);  // only K = 0 has outputs, and they read nothing; NaN if not written
    }
  }
}

TEMPLATE_TEST_CASE("splitting the sequence anywhere, with any mix of forms", "", float, double) {
  const Index T = 37;
  const Problem<double> x = random_problem(2, {.T = T, .HK = 2, .HV = 2}, {any_log_gate(), any_log_gate()});
  const Problem<TestType> xs = x.as<TestType>();
  const Results<long double> exact = oracle(x);
  const Results<TestType> reference = definition(xs);
  double worst = 0;
  for (Index at = 0; at <= T; ++at) {
    for (const Options& first : forms()) {
      for (const Options& second : {recurrent(), chunk(16)}) {
        Results<TestType> a = run(slice(xs, 0, at, initial(xs)), first);
        Results<TestType> y = run(slice(xs, at, T, a), second);
        y.o.values.insert(y.o.values.begin(), a.o.values.begin(), a.o.values.end());
        worst = std::max(worst, worst_ratio(y, reference, exact));
      }
    }
  }
  CHECK(worst <= 1);
}

TEST_CASE("causality: the future, NaN included, leaves earlier outputs bitwise unchanged") {
  const Index T = 70;
  const Problem<float> x = random_problem(3, {.T = T, .HK = 1, .HV = 2}).as<float>();
  for (const Options& options : forms()) {
    const Results<float> y = run(x, options);
    for (const Index P : {0, 1, 15, 16, 17, 63, 64, 69}) {
      Problem<float> z = x;
      for (auto* a : {&z.q, &z.k, &z.v, &z.p}) {
        const std::size_t row = a->values.size() / std::size_t(T);
        for (std::size_t i = std::size_t(P) * row; i < a->values.size(); ++i) a->values[i] = std::nanf("");
      }
      for (auto* a : {&z.log_alpha, &z.log_mu, &z.beta, &z.eta})
        for (std::size_t i = std::size_t(2 * P); i < a->values.size(); ++i) a->values[i] = -7;
      const Results<float> w = run(z, options);
      CHECK(equal_values(first_tokens(w.o, P), first_tokens(y.o, P)));
      CHECK(std::isnan(w.o.values.back()));
    }
  }
}

TEMPLATE_TEST_CASE("results are linear in (v, S_0, M_0) together", "", float, double) {
  const Problem<TestType> x = random_problem(4, {.T = 40}).template as<TestType>();
  Problem<TestType> y = random_problem(5, {.T = 40}).template as<TestType>(), sum = x;
  for (auto member : {&Problem<TestType>::v, &Problem<TestType>::initial_S, &Problem<TestType>::initial_M})
    for (std::size_t i = 0; i < (sum.*member).values.size(); ++i)
      (sum.*member).values[i] = (x.*member).values[i] + 3 * (y.*member).values[i];
  const Problem<TestType> only_v_differs = [&] {
    Problem<TestType> z = x;
    z.v = y.v, z.initial_S = y.initial_S, z.initial_M = y.initial_M;
    return z;
  }();
  for (const Options& options : forms()) {
    const Results<TestType> a = run(x, options), b = run(only_v_differs, options), c = run(sum, options);
    Array<long double> expected = examples::cast<long double>(a.o);
    for (std::size_t i = 0; i < expected.values.size(); ++i)
      expected.values[i] += 3 * static_cast<long double>(b.o.values[i]);
    CHECK(rel_rms(c.o, expected) <= 50 * std::numeric_limits<TestType>::epsilon());
  }
}

TEST_CASE("powers of two pass through bitwise") {
  const Problem<float> x = random_problem(6, {.T = 40}).as<float>();
  const auto scaled = [](Array<float> a, float factor) {
    for (float& value : a.values) value *= factor;
    return a;
  };
  for (const Options& options : forms()) {
    const Results<float> y = run(x, options);
    Problem<float> z = x;
    z.v = scaled(x.v, 8), z.initial_S = scaled(x.initial_S, 8), z.initial_M = scaled(x.initial_M, 8);
    CHECK(equal_values(run(z, options), {scaled(y.o, 8), scaled(y.final_S, 8), scaled(y.final_M, 8)}));

    // The gauge: M is only ever seen as beta M.
    Problem<float> g = x;
    g.eta = scaled(x.eta, 16), g.initial_M = scaled(x.initial_M, 16), g.beta = scaled(x.beta, 1.f / 16);
    CHECK(equal_values(run(g, options), {y.o, y.final_S, scaled(y.final_M, 16)}));
  }
}

TEST_CASE(
    "the exact tier: decays of 0 and 1 and small integers are bitwise equal in all forms and the oracle") {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Problem<double> x = random_problem(seed, {.T = 9, .K = 2, .V = 3});
    for (auto* a : {&x.q, &x.k, &x.v, &x.p, &x.beta, &x.eta, &x.initial_S, &x.initial_M})
      for (double& value : a->values) value = double(random.bits() % 3) - 1;
    for (auto* a : {&x.log_alpha, &x.log_mu})
      for (double& value : a->values) value = random.bits() % 3 ? 0 : -infinity;
    x.scale = 1;
    const Results<long double> exact = oracle(x);
    for (const Options& options : forms()) {
      const Results<double> y = run(x, options);
      CHECK(equal_values(examples::cast<long double>(y.o), exact.o));
      CHECK(equal_values(examples::cast<long double>(y.final_S), exact.final_S));
      CHECK(equal_values(examples::cast<long double>(y.final_M), exact.final_M));
    }
  }
}

TEST_CASE("beta = 0 writes nothing and a zero state stays zero") {
  Problem<float> x = random_problem(7, {.T = 40}, {.beta = constant(0)}).as<float>();
  x.initial_S = {};
  for (const Options& options : forms())
    for (const float value : run(x, options).o.values) CHECK(value == 0);
}

TEST_CASE("a reset forgets every finite past state") {
  Gates gates;
  gates.log_alpha = gates.log_mu = [](Random&, Index t) { return t == 20 ? -infinity : -0.1; };
  Problem<float> x = random_problem(8, {.T = 40}, gates).as<float>();
  // u_t = v_t - p_t S_{t-1} still reads the past at the reset itself; with p = 0 there nothing is left of it.
  for (std::size_t i = 0; i < 5; ++i) x.p.values[20 * 5 + i] = 0;
  Problem<float> other = x;
  for (float& value : other.initial_S.values) value *= -1e6f;
  for (float& value : other.initial_M.values) value += 1e6f;
  for (const Options& options : forms()) {
    const Results<float> a = run(x, options), b = run(other, options);
    CHECK(equal_values(a.final_S, b.final_S));
    CHECK(equal_values(a.final_M, b.final_M));
    CHECK(std::equal(a.o.values.begin() + 20 * 7, a.o.values.end(), b.o.values.begin() + 20 * 7));
    CHECK(!equal_values(a.o, b.o));
  }
}

TEST_CASE("absent optional inputs equal their neutral values bitwise") {
  const Problem<float> x = random_problem(9, {.T = 40}).as<float>();
  const auto filled = [](Array<float> a, float value) {
    std::fill(a.values.begin(), a.values.end(), value);
    return a;
  };
  for (const Options& options : forms()) {
    const auto equal = [&](Array<float> Problem<float>::*member, const Array<float>& neutral) {
      Problem<float> absent = x, present = x;
      absent.*member = {};
      present.*member = neutral;
      CHECK(equal_values(run(absent, options), run(present, options)));
      CHECK(!equal_values(run(absent, options), run(x, options)));
    };
    equal(&Problem<float>::p, x.k);
    equal(&Problem<float>::log_alpha, filled(x.log_alpha, 0));
    equal(&Problem<float>::log_mu, filled(x.log_mu, -std::numeric_limits<float>::infinity()));
    equal(&Problem<float>::beta, filled(x.beta, 1));
    equal(&Problem<float>::eta, filled(x.eta, 1));
    equal(&Problem<float>::initial_S, filled(x.initial_S, 0));
    equal(&Problem<float>::initial_M, filled(x.initial_M, 0));
    Problem<float> scaled = x;
    scaled.scale = 1 / std::sqrt(5.f);
    CHECK(equal_values(run(scaled, options), run(x, options)));
  }
}

// Rules written here on their own, not as a case of ours.
TEST_CASE("reductions to the rules this one generalises") {
  const Index T = 50, K = 5, V = 7;
  using Matrix = Eigen::MatrixXd;
  Problem<double> x = random_problem(10, {.T = T}, {.eta = constant(1)});
  const auto row = [&](const Array<double>& a, Index t) {
    return Eigen::Map<const Eigen::VectorXd>(a.values.data() + t * a.shape[3], a.shape[3]);
  };
  const auto state = [&](const Array<double>& a) {
    return Matrix(Eigen::Map<const Eigen::Matrix<double, -1, -1, Eigen::RowMajor>>(a.values.data(), K, V));
  };
  const auto agree = [&](const std::vector<double>& expected) {
    const Array<long double> e{{1, T, 1, V}, {expected.begin(), expected.end()}};
    for (const Options& options : forms()) CHECK(rel_rms(run(x, options).o, e) < 1e-13);
  };
  const auto append = [&](std::vector<double>& o, const Eigen::VectorXd& o_t) {
    o.insert(o.end(), o_t.begin(), o_t.end());
  };
  std::vector<double> o;

  SECTION("gated delta rule: S = alpha (I - beta k k^T) S + beta k v^T, with p = alpha k and mu = 0") {
    x.log_mu = {};
    for (Index t = 0; t < T; ++t)
      for (Index i = 0; i < K; ++i)
        x.p.values[std::size_t(t * K + i)] = std::exp(x.log_alpha.values[std::size_t(t)]) * row(x.k, t)[i];
    Matrix S = state(x.initial_S);
    for (Index t = 0; t < T; ++t) {
      const double alpha = std::exp(x.log_alpha.values[std::size_t(t)]), beta = x.beta.values[std::size_t(t)];
      S = alpha * (Matrix::Identity(K, K) - beta * row(x.k, t) * row(x.k, t).transpose()) * S +
          beta * row(x.k, t) * row(x.v, t).transpose();
      append(o, S.transpose() * row(x.q, t) / std::sqrt(5.));
    }
    agree(o);
  }
  SECTION("delta rule: S = S + beta k (v - S^T k)^T") {
    x.log_mu = x.log_alpha = x.p = {};
    Matrix S = state(x.initial_S);
    for (Index t = 0; t < T; ++t) {
      S += x.beta.values[std::size_t(t)] * row(x.k, t) *
           (row(x.v, t) - S.transpose() * row(x.k, t)).transpose();
      append(o, S.transpose() * row(x.q, t) / std::sqrt(5.));
    }
    agree(o);
  }
  SECTION("gated linear attention with momentum: p = 0") {
    std::fill(x.p.values.begin(), x.p.values.end(), 0.);
    Matrix S = state(x.initial_S), velocity = -state(x.initial_M);
    for (Index t = 0; t < T; ++t) {
      velocity = std::exp(x.log_mu.values[std::size_t(t)]) * velocity + row(x.k, t) * row(x.v, t).transpose();
      S = std::exp(x.log_alpha.values[std::size_t(t)]) * S + x.beta.values[std::size_t(t)] * velocity;
      append(o, S.transpose() * row(x.q, t) / std::sqrt(5.));
    }
    agree(o);
  }
}

TEST_CASE("the chunk size as a template parameter is within the same budget") {
  const Problem<float> x = random_problem(11, {.T = 77, .K = 16, .V = 16}).as<float>();
  const auto with = [&](auto forward) {
    Results<float> y{examples::zeros<float>(x.v.shape), examples::zeros<float>(x.state_shape()),
                     examples::zeros<float>(x.state_shape())};
    forward(y.outputs());
    return y;
  };
  const Results<long double> exact = oracle(random_problem(11, {.T = 77, .K = 16, .V = 16}));
  const Results<float> reference = definition(x);
  CHECK(worst_ratio(with([&](auto y) { momentum_delta::forward<1>(x.inputs(), y); }), reference, exact) <= 1);
  CHECK(worst_ratio(with([&](auto y) { momentum_delta::forward<16>(x.inputs(), y); }), reference, exact) <=
        1);
  CHECK(worst_ratio(with([&](auto y) { momentum_delta::forward<64>(x.inputs(), y); }), reference, exact) <=
        1);
  CHECK(worst_ratio(with([&](auto y) { momentum_delta::forward<200>(x.inputs(), y); }), reference, exact) <=
        1);
}
