// The selective scan's gradients: golden files, an oracle in long double, complex step, and their interface.
#include <complex>

#include "../support/catch.hpp"
#include "../support/scan.hpp"

using namespace test;
using examples::run_backward;
using momentum_delta::ScanSaved;

namespace {

template <class Scalar>
double ceiling() {
  return std::is_same_v<Scalar, float> ? 1e-5 : 1e-12;
}

}  // namespace

TEMPLATE_TEST_CASE("golden gradients of the selective scan", "", float, double) {
  for (const GoldenScan& golden : golden_scans()) {
    const examples::ScanCase& c = golden.data;
    INFO(golden.file);
    for (const ScanOptions& options : {ScanOptions{}, scan_chunk(1), scan_chunk(16)}) {
      const auto dx = run_backward(c.problem.as<TestType>(), c.upstream.as<TestType>(), options);
      ScanGradients<double>::for_each([&](const char* name, auto get, auto) {
        INFO(name);
        if (!get(dx).absent())
          CHECK(examples::error_of(get(dx), get(c.gradients)).rel_rms <= ceiling<TestType>());
      });
    }
  }
}

TEMPLATE_TEST_CASE("gradients against the oracle", "", float, double) {
  std::uint64_t seed = 0;
  double worst = 0;
  const auto check = [&](const ScanProblem<double>& x, const std::initializer_list<Index>& chunks) {
    const ScanUpstream<double> dy = random_upstream(++seed, x);
    const ScanGradients<long double> exact = oracle_backward(x, dy);
    for (const Index C : chunks) {
      const auto dx = run_backward(x.as<TestType>(), dy.as<TestType>(), {.chunk_size = C});
      ScanGradients<TestType>::for_each([&](const char* name, auto get, auto) {
        INFO(name << " chunk " << C);
        const double error = get(dx).absent() ? 0 : rel_rms(get(dx), get(exact));
        CHECK(error <= ceiling<TestType>());
        worst = std::max(worst, error);
      });
    }
  };
  const auto shape = [&](const ScanShape& s) {
    INFO("B " << s.B << " T " << s.T << " D " << s.D << " G " << s.G << " N " << s.N);
    check(random_scan(++seed, s), {1, 7, 64});
  };
  for (const Index N : {1, 3, 16, 17}) shape({.B = 2, .T = 20, .D = 5, .N = N});
  for (const Index D : {1, 16, 17, 33}) shape({.T = 20, .D = D, .N = 5});
  for (const Index G : {2, 3}) shape({.B = 3, .T = 20, .D = 18 * G, .G = G, .N = 3});
  for (const Index T : {0, 1, 7, 64, 65, 300}) shape({.T = T, .D = 3, .N = 3});
  shape({.T = 40, .D = 1000, .N = 3});
  shape({.B = 3, .T = 40, .D = 1100, .G = 2, .N = 3});

  // Every dt with every A, as in the sweep forward.
  for (const double dt : {1e-6, 1e-3, 1e-1, 1e1, 1e3}) {
    ScanProblem<double> x = random_scan(std::uint64_t(1 / dt), {.T = 67, .D = 10, .N = 4});
    Random random(7);
    for (double& delta : x.delta.values) delta = dt * random.uniform(0.5, 1);
    x.delta_bias = {};
    x.delta_softplus = false;
    for (std::size_t i = 0; i < x.A.values.size(); ++i) x.A.values[i] = -std::pow(10., double(i / 4) - 3);
    INFO("dt " << dt);
    check(x.as<float>().as<double>(), {16, 67});
  }
  WARN("the largest relative error: " << worst);
}

TEST_CASE("gradients at A = -inf, or nearly, and dt = 0 are finite") {
  ScanProblem<double> x = random_scan(1, {.T = 30, .D = 17, .N = 3});
  for (std::size_t i = 0; i < x.A.values.size(); i += 2) x.A.values[i] = i % 4 ? -1e38 : -infinity;
  for (std::size_t i = 0; i < x.delta.values.size(); i += 3) x.delta.values[i] = -1e30;  // softplus: 0
  const ScanUpstream<double> dy = random_upstream(2, x);
  const ScanGradients<float> dx = run_backward(x.as<float>(), dy.as<float>(), {});
  const ScanGradients<long double> exact = oracle_backward(x.as<float>().as<double>(), dy);
  ScanGradients<float>::for_each([&](const char* name, auto get, auto) {
    INFO(name);
    CHECK(rel_rms(get(dx), get(exact)) <= 1e-5);
  });
  for (std::size_t i = 0; i < x.A.values.size(); i += 2) CHECK(dx.dA.values[i] == 0);
}

// d loss / d x_i = Im loss(x + i h e_i) / h, exact to rounding since nothing is subtracted.
TEST_CASE("complex step through both forms gives the gradients") {
  using Complex = std::complex<double>;
  const double h = 1e-100;
  const ScanProblem<double> x = random_scan(9, {.B = 2, .T = 20, .D = 6, .G = 2, .N = 3});
  const ScanUpstream<double> dy = random_upstream(9, x);
  const ScanGradients<double> dx = run_backward(x, dy, {.chunk_size = 7});
  Random random(1);
  for (const ScanOptions& options : {scan_recurrent(), scan_chunk(6)}) {
    ScanGradients<double>::for_each([&](const char* name, auto get, auto get_input) {
      const Array<double>& gradient = get(dx);
      double difference = 0, total = 0;
      for (int sample = 0; sample < 12; ++sample) {
        ScanProblem<Complex> z = x.as<Complex>();
        const std::size_t i = random.bits() % gradient.values.size();
        get_input(z).values[i] += Complex(0, h);
        const ScanResults<Complex> y = examples::run(z, options);
        double loss = 0;  // its imaginary part
        for (std::size_t j = 0; j < dy.dout.values.size(); ++j)
          loss += dy.dout.values[j] * y.out.values[j].imag() / h;
        for (std::size_t j = 0; j < dy.dfinal_state.values.size(); ++j)
          loss += dy.dfinal_state.values[j] * y.final_state.values[j].imag() / h;
        difference = std::max(difference, std::abs(loss - gradient.values[i]));
        total = std::max(total, std::abs(gradient.values[i]));
      }
      INFO(name);
      CHECK(difference <= 1e-12 * std::max(total, 1e-3));
    });
  }
}

TEST_CASE("each gradient alone, added, and of each upstream gradient alone") {
  const ScanProblem<float> x = random_scan(11, {.B = 2, .T = 30, .D = 34, .G = 2, .N = 3}).as<float>();
  const ScanUpstream<float> dy = random_upstream(11, x.as<double>()).as<float>();
  const ScanGradients<float> all = run_backward(x, dy, {.chunk_size = 8});
  ScanSaved<float> saved;
  ScanResults<float> y{examples::unwritten<float>(x.u.shape), {}};
  momentum_delta::scan_forward(x.inputs(), y.outputs(), saved, {.chunk_size = 8});
  ScanGradients<float>::for_each([&](const char* name, auto get, auto) {
    INFO(name);
    ScanGradients<float> one;
    get(one) = examples::unwritten<float>(get(all).shape);
    momentum_delta::scan_backward(x.inputs(), saved, dy.views(), one.views());
    CHECK(equal_values(get(one), get(all)));

    std::fill(get(one).values.begin(), get(one).values.end(), 1.f);
    momentum_delta::ScanInputGradients<float> views = one.views();
    views.accumulate = true;
    momentum_delta::scan_backward(x.inputs(), saved, dy.views(), views);
    bool added = true;
    for (std::size_t i = 0; i < get(one).values.size(); ++i)
      added &= std::abs(get(one).values[i] - (1 + get(all).values[i])) <=
               1e-6f * (1 + std::abs(get(all).values[i]));
    CHECK(added);
  });
  for (auto part : {&ScanUpstream<float>::dout, &ScanUpstream<float>::dfinal_state}) {
    ScanUpstream<float> absent = dy, zero = dy;
    absent.*part = {};
    std::fill((zero.*part).values.begin(), (zero.*part).values.end(), 0.f);
    CHECK(equal_values(run_backward(x, absent, {}), run_backward(x, zero, {})));
  }
}

TEST_CASE("no gradient reaches back from after the last upstream one, and none from nothing") {
  const ScanProblem<float> x = random_scan(12, {.T = 40, .D = 5, .N = 3}).as<float>();
  ScanUpstream<float> dy = random_upstream(12, x.as<double>()).as<float>();
  dy.dfinal_state = {};
  std::fill(dy.dout.values.begin() + 5 * 21, dy.dout.values.end(), 0.f);
  const ScanGradients<float> dx = run_backward(x, dy, {.chunk_size = 16});
  for (const auto* a : {&dx.du, &dx.ddelta, &dx.dz, &dx.dB, &dx.dC}) {
    const std::size_t row = a->values.size() / 40;
    for (std::size_t i = 0; i < a->values.size(); ++i)
      if (i >= 21 * row) CHECK(a->values[i] == 0);
    CHECK(a->values[0] != 0);
  }
}
