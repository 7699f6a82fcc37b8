// The chunk form equals the recurrence for every log_mu and log_alpha, drawn independently.
#include "../examples/support/log_domain_form.hpp"
#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;

namespace {

// The worst ratio of `form` to its budget over the whole sweep.
template <class Scalar, class Form>
double sweep(const Form& form) {
  double worst = 0;
  std::uint64_t seed = 0;
  for_each_gates([&](const Gates& gates) {
    const Problem<double> x = random_problem(++seed, {.T = 133}, gates);
    const Results<long double> exact = oracle(x);
    const Problem<Scalar> xs = x.as<Scalar>();
    const Results<Scalar> r = definition(xs);
    for (const Index C : {1, 2, 3, 16, 64, 128}) {
      worst = std::max(worst, worst_ratio(form(xs, C), r, exact));
    }
  });
  return worst;
}

}  // namespace

TEMPLATE_TEST_CASE("both forms equal the definition over independent sweeps of log_mu and log_alpha", "",
                   float, double) {
  const double worst = sweep<TestType>([](const auto& x, Index C) { return examples::run(x, chunk(C)); });
  WARN("worst ratio to the budget: " << worst);
  CHECK(worst <= 1);
  CHECK(sweep<TestType>([](const auto& x, Index) { return examples::run(x, recurrent()); }) <= 1);
}

TEMPLATE_TEST_CASE("the definition is exact over the sweeps", "", float, double) {
  double worst = 0;
  std::uint64_t seed = 0;
  for_each_gates([&](const Gates& gates) {
    const Problem<double> x = random_problem(++seed, {.T = 133}, gates);
    const Results<long double> exact = oracle(x);
    const Results<TestType> y = definition(x.as<TestType>());
    for (const double e :
         {rel_rms(y.o, exact.o), rel_rms(y.final_S, exact.final_S), rel_rms(y.final_M, exact.final_M)})
      worst = std::isnan(e) ? infinity : std::max(worst, e);
  });
  // A rounding error of eps / 2 a step, amplified by the growth that the rates allow: 1e2 eps covers 133
  // steps.
  CHECK(worst <= 1e2 * double(std::numeric_limits<TestType>::epsilon()));
}

TEST_CASE("negative controls fail the sweep") {
  SECTION("the published log-domain form") {
    CHECK(sweep<float>([](const auto& x, Index C) { return examples::log_domain_form(x, C); }) > 1e3);
    CHECK(sweep<double>([](const auto& x, Index C) { return examples::log_domain_form(x, C); }) > 1e3);
  }
  SECTION("a zero output") {
    CHECK(sweep<float>([](const auto& x, Index C) {
            auto y = examples::run(x, chunk(C));
            y.o = examples::zeros<float>(y.o.shape);
            return y;
          }) > 1e3);
  }
  SECTION("log_mu off by a relative 1e-4") {
    CHECK(sweep<float>([](auto x, Index C) {
            for (float& g : x.log_mu.values) g *= 1.0001f;
            return examples::run(x, chunk(C));
          }) > 1);
  }
}

// The one thing that a chunk form cannot do as well as the recurrence: see Rounding in chunk/forward.hpp.
TEST_CASE("a large value overwritten inside a chunk rounds relative to itself until the chunk ends") {
  Gates gates{constant(0), constant(-infinity), constant(1), constant(1)};
  Problem<double> x = random_problem(1, {.T = 64, .K = 5, .V = 7}, gates);
  for (std::size_t i = 0; i < x.k.values.size(); ++i)
    x.k.values[i] = x.p.values[i] = i % 5 == 0;  // the same unit key
  for (std::size_t i = 0; i < 7; ++i) x.v.values[31 * 7 + i] *= 1e4;
  x = x.as<float>().as<double>();
  const auto after = [&](const auto& a) {  // o of the tokens 40 ..
    Array<long double> tail{{1, 24, 1, 7}, {}};
    tail.values.assign(a.values.begin() + 40 * 7, a.values.end());
    return tail;
  };
  const Array<long double> exact = after(oracle(x).o);
  const auto error = [&](const Options& options) {
    return rel_rms(after(examples::run(x.as<float>(), options).o), exact);
  };
  CHECK(error(recurrent()) < 1e-6);
  CHECK(error(chunk(1)) < 1e-6);
  CHECK(error(chunk(8)) < 1e-6);  // the chunk that meets the large value ends at 40
  for (const Index C : {32, 64}) {
    CHECK(error(chunk(C)) > 1e-5);
    CHECK(error(chunk(C)) < 1e4 * 1e-6);
  }
}

TEST_CASE("the recurrence has forgotten a large value two tokens after it, wherever it stands") {
  Gates gates{constant(0), constant(-infinity), constant(1), constant(1)};
  for (const std::size_t large : {30, 31}) {  // as the second and as the first of two tokens
    Problem<double> x = random_problem(1, {.T = 64, .K = 5, .V = 7}, gates);
    for (std::size_t i = 0; i < x.k.values.size(); ++i)
      x.q.values[i] = x.k.values[i] = x.p.values[i] = 1 / std::sqrt(5.);  // what is not read is not corrected
    for (std::size_t i = 0; i < 7; ++i) x.v.values[large * 7 + i] *= 1e4;
    x = x.as<float>().as<double>();
    const auto soon_after = [&](const auto& a) {
      Array<long double> part{{1, 4, 1, 7}, {}};
      const auto first = a.values.begin() + std::ptrdiff_t((large + 2) * 7);
      part.values.assign(first, first + 4 * 7);
      return part;
    };
    const Array<long double> exact = soon_after(oracle(x).o);
    for (const Options& options : {recurrent(), chunk(1)}) {
      CAPTURE(large);
      CHECK(rel_rms(soon_after(examples::run(x.as<float>(), options).o), exact) < 1e-6);
    }
  }
}

TEST_CASE("the published form is right where nothing cancels, so its failure is the gates'") {
  Gates gates{constant(-0.01), constant(-0.01), uniform(0.5, 1), constant(1)};
  const Problem<double> x = random_problem(1, {.T = 64}, gates);
  CHECK(rel_rms(examples::log_domain_form(x, 16).o, oracle(x).o) < 1e-4);  // beta + 1e-6 is part of that form
  gates.log_mu = constant(-2);
  CHECK(!(rel_rms(examples::log_domain_form(random_problem(1, {.T = 64}, gates).as<float>(), 64).o,
                  oracle(random_problem(1, {.T = 64}, gates)).o) < 0.1));
}
