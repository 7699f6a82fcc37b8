// Gradients of both forms.
#include <complex>
#include <functional>

#include "support/catch.hpp"
#include "support/golden.hpp"
#include "support/problem.hpp"

using namespace test;
using examples::run_backward;
using momentum_delta::GateView;
using momentum_delta::InputGradients;
using momentum_delta::OutputGradients;
using momentum_delta::Saved;
using momentum_delta::StateView;
using momentum_delta::TokenView;

namespace {

std::vector<Options> forms() {
  return {recurrent(), chunk(1), chunk(3), chunk(16), chunk(64)};
}

template <class Scalar>
double gradient_ceiling() {
  return std::is_same_v<Scalar, float> ? 1e-5 : 1e-12;
}

// The largest error of any gradient, relative to its RMS.
template <class Scalar, class Exact>
double error_of(const Gradients<Scalar>& x, const Gradients<Exact>& expected) {
  double worst = 0;
  Gradients<Scalar>::for_each([&](const char*, auto get, auto) {
    if (get(expected).absent()) return;
    const double error = rel_rms(get(x), examples::cast<long double>(get(expected)));
    worst = std::isnan(error) ? infinity : std::max(worst, error);
  });
  return worst;
}

}  // namespace

TEMPLATE_TEST_CASE("golden gradients, whatever is saved", "", float, double) {
  const auto files = golden_files("");
  for (const auto& [path, file] : files) {
    const examples::Case c = examples::read_case(file);
    REQUIRE(!c.gradients.dinitial_M.absent());
    for (const Algorithm algorithm : {Algorithm::recurrent, Algorithm::chunk}) {
      for (const Index C : {1, 3, 16, 64, 128}) {
        for (const Index interval : {1, 2, 1000}) {
          for (const bool keep_u : {false, true}) {
            const Options options{algorithm, C, true};
            INFO(path << " algorithm " << int(algorithm) << " chunk " << C << " interval " << interval);
            CHECK(error_of(run_backward(c.problem.as<TestType>(), c.upstream.as<TestType>(), options,
                                        interval, keep_u),
                           c.gradients) <= gradient_ceiling<TestType>());
          }
        }
      }
    }
  }
  CHECK(files.size() == 15);
}

TEMPLATE_TEST_CASE("gradients over independent sweeps of log_mu and log_alpha, gates element by element", "",
                   float, double) {
  double worst = 0, flipped = infinity;
  std::uint64_t seed = 0;
  for_each_gates([&](const Gates& gates) {
    const Problem<double> x = random_problem(++seed, {.T = 133}, gates);
    const Upstream<double> dy = random_upstream(seed, x);
    Gradients<long double> sizes;
    const Gradients<long double> exact = oracle_backward(x, dy, &sizes);
    const auto run = [&](const Options& options) {
      return run_backward(x.as<TestType>(), dy.as<TestType>(), options);
    };
    const Gradients<TestType> r = run(recurrent());
    for (const Index C : {1, 2, 3, 16, 64, 128})
      worst = std::max(worst, worst_ratio(run(chunk(C)), r, exact, sizes));
    Gradients<TestType> wrong = run(chunk(16));  // the control
    for (TestType& value : wrong.dv.values) value = -value;
    flipped = std::min(flipped, worst_ratio(wrong, r, exact, sizes));
  });
  WARN("worst ratio to the budget: " << worst);
  CHECK(worst <= 1);
  CHECK(flipped > 1e3);
}

TEMPLATE_TEST_CASE("the recurrent backward is exact over the sweeps", "", float, double) {
  double worst = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Problem<double> x =
        random_problem(seed, {.T = 133}, {any_log_gate(), any_log_gate(), any_rate(), any_rate()});
    const Upstream<double> dy = random_upstream(seed, x);
    worst = std::max(worst, error_of(run_backward(x.as<TestType>(), dy.as<TestType>(), recurrent()),
                                     oracle_backward(x, dy)));
  }
  CHECK(worst <= 1e2 * double(std::numeric_limits<TestType>::epsilon()));
}

// d loss / d x_i = Im loss(x + i h e_i) / h through the templated recurrence, for every element of every
// input.
TEST_CASE("complex step through the recurrence, T = 2 C + 1") {
  using Complex = std::complex<double>;
  const Index C = 4;
  const Problem<double> x = random_problem(3, {.T = 2 * C + 1, .HK = 1, .HV = 2, .K = 3, .V = 2});
  const Upstream<double> dy = random_upstream(3, x);
  const double h = 1e-100;
  const std::vector<Gradients<double>> gradients = {run_backward(x, dy, recurrent()),
                                                    run_backward(x, dy, chunk(C))};
  Gradients<double>::for_each([&](const char* name, auto get, auto get_input) {
    Problem<Complex> z = x.as<Complex>();
    std::vector<double> exact;
    for (Complex& entry : get_input(z).values) {
      const Complex value = entry;
      entry += Complex(0, h);
      const Results<Complex> y = examples::run(z, recurrent());
      entry = value;
      double loss = 0;
      for (std::size_t j = 0; j < y.o.values.size(); ++j) loss += dy.do_.values[j] * y.o.values[j].imag() / h;
      for (std::size_t j = 0; j < y.final_S.values.size(); ++j)
        loss += (dy.dfinal_S.values[j] * y.final_S.values[j].imag() +
                 dy.dfinal_M.values[j] * y.final_M.values[j].imag()) /
                h;
      exact.push_back(loss);
    }
    INFO("d" << name);
    for (const Gradients<double>& dx : gradients)
      CHECK(examples::error_of(get(dx), {get(dx).shape, exact}).rel_rms <= 1e-12);
  });
}

TEST_CASE("what is saved changes no bit") {
  const Problem<float> x = random_problem(4, {.B = 2, .T = 50, .HK = 1, .HV = 2}).as<float>();
  const Upstream<float> dy = random_upstream(4, x.as<double>()).as<float>();
  const Gradients<float> reference = run_backward(x, dy, chunk(8));
  for (const Index interval : {1, 2, 3, 7, 100})
    for (const bool keep_u : {false, true})
      CHECK(equal_values(run_backward(x, dy, chunk(8), interval, keep_u), reference));
  Problem<float> packed = random_problem(4, {.T = 50, .HK = 1, .HV = 2}).as<float>();
  packed.cu_seqlens = {0, 3, 3, 37, 50};
  packed.initial_S = packed.initial_M = {};
  Upstream<float> d_packed = random_upstream(4, packed.as<double>()).as<float>();
  CHECK(equal_values(run_backward(packed, d_packed, chunk(8), 2, true),
                     run_backward(packed, d_packed, chunk(8), 2, false)));
  // Nor does a forward pass that saves.
  Saved<float> saved(2, true);
  for (const Options& options : forms()) {
    Results<float> y = examples::run(x, options), z = y;
    for (auto* a : {&z.o, &z.final_S, &z.final_M}) std::fill(a->values.begin(), a->values.end(), 42.f);
    momentum_delta::forward(x.inputs(), z.outputs(), saved, options);
    CHECK(equal_values(y, z));
  }
}

TEMPLATE_TEST_CASE("the forward pass may be one form and the backward pass the other", "", float, double) {
  const Problem<TestType> x = random_problem(5, {.T = 50}).template as<TestType>();
  const Upstream<TestType> dy = random_upstream(5, x.template as<double>()).template as<TestType>();
  const Gradients<TestType> reference = run_backward(x, dy, chunk(8));
  for (const Algorithm first : {Algorithm::recurrent, Algorithm::chunk}) {
    for (const Algorithm second : {Algorithm::recurrent, Algorithm::chunk}) {
      for (const bool keep_u : {false, true}) {
        Saved<TestType> saved(2, keep_u);
        Results<TestType> y = examples::run(x, recurrent());
        momentum_delta::forward(x.inputs(), y.outputs(), saved, {first, 8});
        Gradients<TestType> dx{x.q,      x.k,    x.v,   x.p,         x.log_alpha,
                               x.log_mu, x.beta, x.eta, x.initial_S, x.initial_M};
        momentum_delta::backward(x.inputs(), saved, dy.views(), dx.views(), {.algorithm = second});
        CHECK(error_of(dx, reference) < 450 * double(std::numeric_limits<TestType>::epsilon()));
      }
    }
  }
}

TEST_CASE("gates at 0 and -inf: finite, and exactly 0 where a reset cuts the past") {
  const Gate hard = [](Random& random, Index) { return random.bits() % 2 ? 0 : -infinity; };
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Problem<float> x =
        random_problem(seed, {.T = 40}, {hard, hard, any_rate(), any_rate()}).as<float>();
    const Upstream<float> dy = random_upstream(seed, x.as<double>()).as<float>();
    for (const Options& options : forms()) {
      const Gradients<float> dx = run_backward(x, dy, options);
      Gradients<float>::for_each([&](const char* name, auto get, auto) {
        INFO(name);
        bool finite = true;
        for (const float value : get(dx).values) finite &= std::isfinite(value);
        CHECK(finite);
      });
      for (std::size_t t = 0; t < 40; ++t) {
        if (x.log_alpha.values[t] != 0) CHECK(dx.dlog_alpha.values[t] == 0);
        if (x.log_mu.values[t] != 0) CHECK(dx.dlog_mu.values[t] == 0);
      }
      const bool cut = std::count(x.log_mu.values.begin(), x.log_mu.values.end(), 0.f) < 40;
      if (cut && x.log_mu.values[0] != 0)
        for (const float value : dx.dinitial_M.values) CHECK(value == 0);
    }
  }
}

TEST_CASE("every subset of upstream gradients: an absent one is 0") {
  const Problem<float> x = random_problem(6, {.B = 2, .T = 20, .HK = 1, .HV = 2}).as<float>();
  const Upstream<float> dy = random_upstream(6, x.as<double>()).as<float>();
  for (const Options& options : forms()) {
    for (int subset = 0; subset < 8; ++subset) {
      Upstream<float> absent, zero = dy;
      const auto take = [&](int bit, auto member) {
        if (subset & bit)
          absent.*member = dy.*member;
        else
          std::fill((zero.*member).values.begin(), (zero.*member).values.end(), 0.f);
      };
      take(1, &Upstream<float>::do_);
      take(2, &Upstream<float>::dfinal_S);
      take(4, &Upstream<float>::dfinal_M);
      const Gradients<float> dx = run_backward(x, absent, options);
      CHECK(equal_values(dx, run_backward(x, zero, options)));
      if (subset == 0)
        for (const float value : dx.dv.values) CHECK(value == 0);
    }
  }
}

TEST_CASE("every optional input absent has the gradients of its neutral value") {
  const Problem<float> x = random_problem(7, {.T = 20, .HK = 1, .HV = 2}).as<float>();
  const Upstream<float> dy = random_upstream(7, x.as<double>()).as<float>();
  const auto filled = [](Array<float> a, float value) {
    std::fill(a.values.begin(), a.values.end(), value);
    return a;
  };
  for (const Options& options : forms()) {
    const auto same = [&](Array<float> Problem<float>::*input, Array<float> Gradients<float>::*gradient,
                          const Array<float>& neutral) {
      Problem<float> absent = x, present = x;
      absent.*input = {};
      present.*input = neutral;
      const Gradients<float> a = run_backward(absent, dy, options);
      Gradients<float> b = run_backward(present, dy, options);
      CHECK((a.*gradient).absent());
      (b.*gradient) = {};
      CHECK(equal_values(a, b));
    };
    same(&Problem<float>::log_alpha, &Gradients<float>::dlog_alpha, filled(x.log_alpha, 0));
    same(&Problem<float>::log_mu, &Gradients<float>::dlog_mu,
         filled(x.log_mu, -std::numeric_limits<float>::infinity()));
    same(&Problem<float>::beta, &Gradients<float>::dbeta, filled(x.beta, 1));
    same(&Problem<float>::eta, &Gradients<float>::deta, filled(x.eta, 1));

    // A zero state is an input like any other: its gradient can be had without giving it.
    Problem<float> absent = x, present = x;
    absent.initial_S = absent.initial_M = {};
    present.initial_S = filled(x.initial_S, 0);
    present.initial_M = filled(x.initial_M, 0);
    CHECK(equal_values(run_backward(absent, dy, options), run_backward(present, dy, options)));

    // p absent is k: the gradients of both, added.
    absent = present = x;
    absent.p = {};
    present.p = x.k;
    const Gradients<float> a = run_backward(absent, dy, options), b = run_backward(present, dy, options);
    Array<long double> sum = examples::cast<long double>(b.dk);
    for (std::size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += b.dp.values[i];
    CHECK(rel_rms(a.dk, sum) < 1e-6);
    CHECK(equal_values(a.dlog_mu, b.dlog_mu));
  }
}

TEST_CASE("no gradient from the future: zero upstream from P on gives exactly zero gradients there") {
  const Index T = 40;
  const Problem<float> x = random_problem(8, {.T = T}).as<float>();
  for (const Index P : {0, 1, 15, 16, 17, 39}) {
    Upstream<float> dy = random_upstream(8, x.as<double>()).as<float>();
    dy.dfinal_S = dy.dfinal_M = {};
    std::fill(dy.do_.values.begin() + P * 7, dy.do_.values.end(), 0.f);
    for (const Options& options : forms()) {
      const Gradients<float> dx = run_backward(x, dy, options);
      for (auto member : {&Gradients<float>::dq, &Gradients<float>::dk, &Gradients<float>::dv,
                          &Gradients<float>::dp, &Gradients<float>::dlog_alpha, &Gradients<float>::dlog_mu,
                          &Gradients<float>::dbeta, &Gradients<float>::deta}) {
        const auto& values = (dx.*member).values;
        CHECK(std::all_of(values.begin() + P * (Index(values.size()) / T), values.end(),
                          [](float g) { return g == 0; }));
      }
    }
  }
}

// The gradients of tokens before P are the same bits.
void check_same_before(Index P, const Gradients<float>& dx, const Gradients<float>& dz) {
  for (auto member : {&Gradients<float>::dq, &Gradients<float>::dk, &Gradients<float>::dv,
                      &Gradients<float>::dp, &Gradients<float>::dlog_alpha, &Gradients<float>::dlog_mu,
                      &Gradients<float>::dbeta, &Gradients<float>::deta}) {
    const auto &a = (dx.*member).values, &b = (dz.*member).values;
    CHECK(std::equal(a.begin(), a.begin() + P * (Index(a.size()) / dx.dq.shape[1]), b.begin()));
  }
}

TEST_CASE(
    "values that nothing upstream depends on, NaN included, leave earlier gradients bitwise unchanged") {
  const Problem<float> x = random_problem(8, {.T = 40}).as<float>();
  for (const Index P : {1, 15, 16, 17, 39}) {
    Upstream<float> dy = random_upstream(8, x.as<double>()).as<float>();
    dy.dfinal_S = dy.dfinal_M = {};
    std::fill(dy.do_.values.begin() + P * 7, dy.do_.values.end(), 0.f);
    Problem<float> z = x;
    std::fill(z.v.values.begin() + P * 7, z.v.values.end(), std::nanf(""));
    for (const Options& options : forms()) {
      const Gradients<float> dx = run_backward(x, dy, options), dz = run_backward(z, dy, options);
      check_same_before(P, dx, dz);
      CHECK(std::isnan(dz.dq.values.back()));
    }
  }
}

TEST_CASE("products of a key with earlier tokens, which no formula has, may overflow") {
  const Index T = 40;
  Problem<float> x = random_problem(8, {.T = T, .own_p = true}).as<float>();
  const Index K = x.k.shape[3];
  x.initial_S = x.initial_M = {};
  for (const Index P : {1, 15, 16, 17, 39}) {
    Upstream<float> dy = random_upstream(8, x.as<double>()).as<float>();
    dy.dfinal_S = dy.dfinal_M = {};
    std::fill(dy.do_.values.begin() + P * 7, dy.do_.values.end(), 0.f);
    for (auto reader : {&Problem<float>::q, &Problem<float>::p}) {
      Problem<float> z = x;  // S is 0 before P, so that a large p reads 0
      std::fill(z.eta.values.begin(), z.eta.values.begin() + P, 0.f);
      for (Index i = 0; i < P * K; ++i) (z.*reader).values[std::size_t(i)] *= 1e25f;
      Problem<float> large = z;
      for (Index i = P * K; i < T * K; ++i) large.k.values[std::size_t(i)] *= 1e25f;
      for (const Options& options : forms())
        check_same_before(P, run_backward(z, dy, options), run_backward(large, dy, options));
    }
  }
}

TEST_CASE("gradients are assigned, or added to what is there") {
  const Problem<float> x = random_problem(9, {.B = 2, .T = 20, .HK = 2, .HV = 4}).as<float>();
  const Upstream<float> dy = random_upstream(9, x.as<double>()).as<float>();
  for (const Options& options : {recurrent(), chunk(16)}) {
    const Gradients<float> once = run_backward(x, dy, options);
    Saved<float> saved;
    Results<float> y = examples::run(x, options);
    momentum_delta::forward(x.inputs(), y.outputs(), saved, options);
    Gradients<float> dx = once;
    Gradients<float>::for_each(
        [&](const char*, auto get, auto) { std::fill(get(dx).values.begin(), get(dx).values.end(), 42.f); });
    auto views = dx.views();
    momentum_delta::backward(x.inputs(), saved, dy.views(), views, options);  // over what it held
    CHECK(equal_values(dx, once));
    views.accumulate = true;
    momentum_delta::backward(x.inputs(), saved, dy.views(), views, options);
    Gradients<float>::for_each([&](const char* name, auto get, auto) {
      Array<long double> twice = examples::cast<long double>(get(once));
      for (long double& value : twice.values) value *= 2;
      INFO(name);
      CHECK(rel_rms(get(dx), twice) < 1e-6);
    });
  }
}

TEST_CASE("only the gradients that are wanted, and the others do not change") {
  const Problem<float> x = random_problem(10, {.T = 20, .HK = 1, .HV = 2}).as<float>();
  const Upstream<float> dy = random_upstream(10, x.as<double>()).as<float>();
  for (const Options& options : {recurrent(), chunk(16)}) {
    const Gradients<float> all = run_backward(x, dy, options);
    Saved<float> saved;
    Results<float> y = examples::run(x, options);
    momentum_delta::forward(x.inputs(), y.outputs(), saved, options);
    Gradients<float>::for_each([&](const char* name, auto get, auto) {
      Gradients<float> one;
      get(one) = examples::unwritten<float>(get(all).shape);
      momentum_delta::backward(x.inputs(), saved, dy.views(), one.views(), options);
      INFO(name);
      CHECK(equal_values(get(one), get(all)));
    });
  }
}

TEST_CASE("grouped heads add up, packed sequences are sequences of their own") {
  Problem<double> x = random_problem(11, {.T = 23, .HK = 2, .HV = 6});
  x.cu_seqlens = {0, 0, 1, 2, 20, 20, 23};
  x.initial_S = x.initial_M = examples::zeros<double>(x.state_shape());
  Random random(12);
  for (auto* a : {&x.initial_S, &x.initial_M})
    for (double& value : a->values) value = float(random.normal());
  const Upstream<double> dy = random_upstream(11, x);
  const Gradients<long double> exact = oracle_backward(x, dy);
  for (const Options& options : forms()) {
    const Gradients<double> dx = run_backward(x, dy, options);
    CHECK(rel_rms(dx.dq, exact.dq) < 1e-13);
    CHECK(rel_rms(dx.dk, exact.dk) < 1e-13);
    CHECK(rel_rms(dx.dv, exact.dv) < 1e-13);
    CHECK(rel_rms(dx.dp, exact.dp) < 1e-13);
    CHECK(rel_rms(dx.dlog_alpha, exact.dlog_alpha) < 1e-13);
    CHECK(rel_rms(dx.dlog_mu, exact.dlog_mu) < 1e-13);
    CHECK(rel_rms(dx.dinitial_S, exact.dinitial_S) < 1e-13);
    CHECK(rel_rms(dx.dinitial_M, exact.dinitial_M) < 1e-13);
  }
}

TEST_CASE("strided gradients leave the gaps alone, and states are differentiated in place") {
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Problem<float> x = random_problem(13, {.T = 20}).as<float>();
  const Upstream<float> dy = random_upstream(13, x.as<double>()).as<float>();
  for (const Options& options : {recurrent(), chunk(16)}) {
    const Gradients<float> dense = run_backward(x, dy, options);
    Saved<float> saved;
    Results<float> y = examples::run(x, options);
    momentum_delta::forward(x.inputs(), y.outputs(), saved, options);

    Rows tokens = Rows::Constant(20, 30, 42), gates = Rows::Constant(20, 6, 42);
    Upstream<float> state = dy;
    momentum_delta::backward(x.inputs(), saved, state.views(),
                             InputGradients<float>{.dq = tokens.middleCols(1, 5),
                                                   .dk = tokens.middleCols(7, 5),
                                                   .dv = tokens.middleCols(13, 7),
                                                   .dp = tokens.middleCols(21, 5),
                                                   .dlog_alpha = gates.col(0),
                                                   .dlog_mu = gates.col(2),
                                                   .dbeta = gates.col(3),
                                                   .deta = gates.col(5),
                                                   .dinitial_S = state.dfinal_S.view<StateView<float>>(),
                                                   .dinitial_M = state.dfinal_M.view<StateView<float>>()},
                             options);
    const auto rows = [](const Array<float>& a) {
      return Eigen::Map<const Rows>(a.values.data(), 20, Index(a.values.size()) / 20);
    };
    CHECK(tokens.middleCols(1, 5) == rows(dense.dq));
    CHECK(tokens.middleCols(7, 5) == rows(dense.dk));
    CHECK(tokens.middleCols(13, 7) == rows(dense.dv));
    CHECK(tokens.middleCols(21, 5) == rows(dense.dp));
    CHECK(gates.col(0) == rows(dense.dlog_alpha));
    CHECK(gates.col(2) == rows(dense.dlog_mu));
    CHECK(gates.col(3) == rows(dense.dbeta));
    CHECK(gates.col(5) == rows(dense.deta));
    for (const int gap : {0, 6, 12, 20, 26, 29}) CHECK((tokens.col(gap).array() == 42).all());
    CHECK((gates.col(1).array() == 42).all());
    CHECK((gates.col(4).array() == 42).all());
    CHECK(equal_values(state.dfinal_S, dense.dinitial_S));
    CHECK(equal_values(state.dfinal_M, dense.dinitial_M));
  }
}

TEST_CASE("gate gradients of several heads with strides of their own") {
  const Problem<float> x = random_problem(14, {.B = 2, .T = 20, .HK = 1, .HV = 3}).as<float>();
  const Upstream<float> dy = random_upstream(14, x.as<double>()).as<float>();
  for (const Options& options : {recurrent(), chunk(16)}) {
    const Gradients<float> dense = run_backward(x, dy, options);
    Saved<float> saved;
    Results<float> y = examples::run(x, options);
    momentum_delta::forward(x.inputs(), y.outputs(), saved, options);
    std::vector<float> memory(2 * 20 * 3 * 2, 42.f);  // [B, HV, T, 2]
    const GateView<float> view(memory.data(), {2, 20, 3}, {120, 2, 40});
    momentum_delta::backward(x.inputs(), saved, dy.views(), {.dlog_mu = view}, options);
    for (Index b = 0; b < 2; ++b)
      for (Index t = 0; t < 20; ++t)
        for (Index h = 0; h < 3; ++h) {
          const float* const element = view.data + b * 120 + t * 2 + h * 40;
          CHECK(element[0] == dense.dlog_mu.values[std::size_t((b * 20 + t) * 3 + h)]);
          CHECK(element[1] == 42.f);
        }
  }
}

TEST_CASE("sizes of zero have gradients too") {
  for (const Shape& s : {Shape{.T = 0}, Shape{.T = 4, .K = 0, .V = 3}, Shape{.T = 4, .K = 3, .V = 0},
                         Shape{.B = 0, .T = 4}, Shape{.T = 4, .HK = 0, .HV = 0}}) {
    const Problem<double> x = random_problem(14, s);
    const Upstream<double> dy = random_upstream(14, x);
    for (const Options& options : forms()) {
      const Gradients<double> dx = run_backward(x, dy, options);
      if (s.T == 0) {
        CHECK(equal_values(dx.dinitial_S, dy.dfinal_S));
        CHECK(equal_values(dx.dinitial_M, dy.dfinal_M));
      }
      for (const auto* a : {&dx.dq, &dx.dk, &dx.dp, &dx.dlog_alpha, &dx.dlog_mu, &dx.dbeta, &dx.deta})
        for (const double value : a->values) CHECK(value == 0);
      for (const double value : dx.dv.values) CHECK(value == 0);
    }
  }
}

TEST_CASE("bad input to backward: named, and nothing written") {
  const auto refused = [](const std::string& expected, auto spoil) {
    Problem<float> x = random_problem(15, {.B = 2, .T = 6, .HK = 2, .HV = 4, .K = 3, .V = 5}).as<float>();
    Upstream<float> dy = random_upstream(15, x.as<double>()).as<float>();
    Saved<float> saved;
    Results<float> y = examples::run(x, chunk(4));
    momentum_delta::forward(x.inputs(), y.outputs(), saved, chunk(4));
    Gradients<float> dx = run_backward(x, dy, chunk(4));
    const Gradients<float> before = dx;
    struct Call {
      momentum_delta::Inputs<float> x;
      Saved<float> saved;
      OutputGradients<float> dy;
      InputGradients<float> dx;
      Options options;
    } call{x.inputs(), saved, dy.views(), dx.views(), {}};
    call.x.scale = 2.f;  // so that an accepted call would change dx
    spoil(call);
    std::string message = "accepted";
    try {
      momentum_delta::backward(call.x, call.saved, call.dy, call.dx, call.options);
    } catch (const std::invalid_argument& e) {
      message = e.what();
    }
    CHECK(message == (expected == "accepted" ? expected : "momentum_delta::backward: " + expected));
    CHECK(equal_values(dx, before) == (expected != "accepted"));
  };
  refused("accepted", [](auto&) {});
  refused("accepted", [](auto& c) { c.options.chunk_size = 4; });
  refused("saved holds no forward pass", [](auto& c) { c.saved = Saved<float>(); });
  refused("options.chunk_size = 5, but saved was made with 4", [](auto& c) { c.options.chunk_size = 5; });
  refused("options.chunk_size = 0 is less than 1", [](auto& c) { c.options.chunk_size = 0; });
  refused("k has shape [2, 6, 2, 4], not [B, T, HK, K] of q = [2, 6, 2, 3]",
          [](auto& c) { c.x.k.shape[3] = 4; });
  refused("do_ has shape [2, 6, 4, 4], not [B, T, HV, V] of v = [2, 6, 4, 5]",
          [](auto& c) { c.dy.do_.shape[3] = 4; });
  refused("dfinal_S has shape [1, 4, 3, 5], not [N, HV, K, V] = [2, 4, 3, 5]",
          [](auto& c) { c.dy.dfinal_S.shape[0] = 1; });
  refused("dfinal_M has shape [1, 4, 3, 5], not [N, HV, K, V] = [2, 4, 3, 5]",
          [](auto& c) { c.dy.dfinal_M.shape[0] = 1; });
  refused("dq has shape [2, 6, 4, 3], not [B, T, HK, K] of q = [2, 6, 2, 3]",
          [](auto& c) { c.dx.dq.shape[2] = 4; });
  refused("dk has shape [2, 5, 2, 3], not [B, T, HK, K] of k = [2, 6, 2, 3]",
          [](auto& c) { c.dx.dk.shape[1] = 5; });
  refused("dv has shape [2, 6, 2, 5], not [B, T, HV, V] of v = [2, 6, 4, 5]",
          [](auto& c) { c.dx.dv.shape[2] = 2; });
  refused("dp has shape [2, 6, 4, 3], not the shape of p = [2, 6, 2, 3]",
          [](auto& c) { c.dx.dp.shape[2] = 4; });
  refused("dlog_mu has shape [2, 6, 2], not [B, T, HV] = [2, 6, 4]",
          [](auto& c) { c.dx.dlog_mu.shape[2] = 2; });
  refused("dinitial_M has shape [2, 4, 5, 3], not [N, HV, K, V] = [2, 4, 3, 5]",
          [](auto& c) { std::swap(c.dx.dinitial_M.shape[2], c.dx.dinitial_M.shape[3]); });
  refused("dp must be absent: p is absent", [](auto& c) { c.x.p = {}; });
  refused("dlog_mu must be absent: log_mu is absent", [](auto& c) { c.x.log_mu = {}; });
  refused("deta must be absent: eta is absent", [](auto& c) { c.x.eta = {}; });
  refused("dv shares memory with do_", [](auto& c) { c.dx.dv.data = const_cast<float*>(c.dy.do_.data); });
  refused("dk shares memory with dq", [](auto& c) { c.dx.dk.data = c.dx.dq.data; });
  refused("dq shares memory with k", [](auto& c) { c.dx.dq.data = const_cast<float*>(c.x.k.data); });
  refused("dp shares memory with dv", [](auto& c) { c.dx.dp.data = c.dx.dv.data; });
  refused("dp shares memory with p", [](auto& c) { c.dx.dp.data = const_cast<float*>(c.x.p.data); });
  refused("dlog_alpha shares memory with beta",
          [](auto& c) { c.dx.dlog_alpha.data = const_cast<float*>(c.x.beta.data); });
  refused("dlog_mu shares memory with dlog_alpha", [](auto& c) { c.dx.dlog_mu.data = c.dx.dlog_alpha.data; });
  refused("dbeta shares memory with dlog_mu", [](auto& c) { c.dx.dbeta.data = c.dx.dlog_mu.data; });
  refused("deta shares memory with dbeta", [](auto& c) { c.dx.deta.data = c.dx.dbeta.data; });
  refused("dinitial_S shares memory with dfinal_S", [](auto& c) {
    c.dx.accumulate = true;
    c.dx.dinitial_S.data = const_cast<float*>(c.dy.dfinal_S.data);
  });
  refused("dinitial_M shares memory with dinitial_S",
          [](auto& c) { c.dx.dinitial_M.data = c.dx.dinitial_S.data; });
  refused("dinitial_S shares memory with dfinal_M",
          [](auto& c) { c.dx.dinitial_S.data = const_cast<float*>(c.dy.dfinal_M.data); });
  refused("saved is of a forward pass with T = 6, but x has 5", [](auto& c) {
    for (auto* view : {&c.x.q, &c.x.k, &c.x.v, &c.x.p, &c.dy.do_}) view->shape[1] = 5;
    for (auto* view : {&c.x.log_alpha, &c.x.log_mu, &c.x.beta, &c.x.eta}) view->shape[1] = 5;
    c.dx = {};
  });
  CHECK_THROWS_AS(Saved<float>(0), std::invalid_argument);
}

TEST_CASE("a Saved is copied, moved and used again, and refuses what it was not filled by") {
  const Problem<float> x = random_problem(17, {.T = 30, .HK = 1, .HV = 2}).as<float>();
  const Upstream<float> dy = random_upstream(17, x.as<double>()).as<float>();
  const Gradients<float> expected = run_backward(x, dy, chunk(4));
  Gradients<float> dx = expected;
  const auto backward = [&](const Saved<float>& saved) {
    std::fill(dx.dq.values.begin(), dx.dq.values.end(), 42.f);
    momentum_delta::backward(x.inputs(), saved, dy.views(), dx.views());
    return equal_values(dx, expected);
  };
  Saved<float> saved(std::numeric_limits<Index>::max());  // the initial state alone
  CHECK(saved.empty());
  Results<float> y = examples::run(x, chunk(4));
  const Problem<float> longer = random_problem(18, {.B = 2, .T = 90, .HK = 2, .HV = 2, .K = 9}).as<float>();
  Results<float> z = examples::run(longer, chunk(4));
  momentum_delta::forward(longer.inputs(), z.outputs(), saved, chunk(16));
  CHECK(!saved.empty());
  CHECK(saved.chunk_size() == 16);
  CHECK_THROWS_AS(backward(saved), std::invalid_argument);
  momentum_delta::forward(x.inputs(), y.outputs(), saved, chunk(4));
  const Saved<float> copy = saved;
  CHECK(backward(saved));
  CHECK(backward(copy));
  const Saved<float> moved = std::move(saved);
  CHECK(backward(moved));
  CHECK(saved.empty());
  CHECK_THROWS_AS(backward(saved), std::invalid_argument);

  // A forward pass that is refused leaves it as it was.
  Saved<float> kept = copy;
  auto bad = x.inputs();
  bad.k.shape[3] = 3;
  CHECK_THROWS_AS(momentum_delta::forward(bad, y.outputs(), kept, chunk(4)), std::invalid_argument);
  CHECK(backward(kept));

  // One that ends early leaves nothing to be read.
  class Ended final : public momentum_delta::Executor {
   public:
    int threads() const override { return 1; }
    void run(Index, momentum_delta::TaskRef) override { throw std::runtime_error("ended"); }
  } ended;
  Saved<float> half_filled = copy;
  CHECK_THROWS_AS(
      momentum_delta::forward(x.inputs(), y.outputs(), half_filled, {.chunk_size = 4, .executor = &ended}),
      std::runtime_error);
  CHECK_THROWS_AS(backward(half_filled), std::invalid_argument);

  // The same sizes cut into other sequences.
  Problem<float> packed = x;
  packed.cu_seqlens = {0, 30};
  momentum_delta::forward(packed.inputs(), y.outputs(), kept, chunk(4));
  CHECK_THROWS_AS(backward(kept), std::invalid_argument);
}
