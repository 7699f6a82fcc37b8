// The selective scan's values: golden files, an oracle in long double, and what must hold to the bit.
#include "../support/catch.hpp"
#include "../support/scan.hpp"

using namespace test;

namespace {

template <class Scalar>
double ceiling() {
  return std::is_same_v<Scalar, float> ? 3e-6 : 1e-13;
}

// The tokens [begin, end) of a problem of one sequence.
ScanProblem<float> slice(const ScanProblem<float>& x, Index begin, Index end) {
  ScanProblem<float> part = x;
  for (auto* a : {&part.u, &part.delta, &part.B, &part.C, &part.z}) {
    const Index row = a->shape[1] == 0 ? 0 : Index(a->values.size()) / a->shape[1];
    a->values = {a->values.begin() + begin * row, a->values.begin() + end * row};
    a->shape[1] = end - begin;
  }
  return part;
}

}  // namespace

TEMPLATE_TEST_CASE("golden values of the selective scan", "", float, double) {
  const std::vector<GoldenScan> cases = golden_scans();
  CHECK(cases.size() == 4);
  for (const GoldenScan& golden : cases) {
    const examples::ScanCase& c = golden.data;
    INFO(golden.file);
    REQUIRE(!c.expected.out.absent());
    const auto check = [&](const ScanOptions& options) {
      const ScanResults<TestType> y = examples::run(c.problem.as<TestType>(), options);
      CHECK(examples::error_of(y.out, c.expected.out).rel_rms <= ceiling<TestType>());
      CHECK(examples::error_of(y.final_state, c.expected.final_state).rel_rms <= ceiling<TestType>());
    };
    check({});
    for (const Index C : {1, 3, 16, 64}) check(scan_chunk(C));
  }
}

// N that are less, equal and more than what the loops take together; channels with tails of a cache line;
// tokens around a block and around a chunk; panels of channels that pass each block together, up to eight and
// fewer.
TEMPLATE_TEST_CASE("shapes against the oracle", "", float, double) {
  std::uint64_t seed = 0;
  const auto check = [&](const ScanShape& shape) {
    const ScanProblem<double> x = random_scan(++seed, shape);
    const ScanResults<long double> exact = oracle(x);
    INFO("B " << shape.B << " T " << shape.T << " D " << shape.D << " G " << shape.G << " N " << shape.N);
    for (const ScanOptions& options : {scan_recurrent(), scan_chunk(1), scan_chunk(7), scan_chunk(64)}) {
      const ScanResults<TestType> y = examples::run(x.as<TestType>(), options);
      CHECK(rel_rms(y.out, exact.out) <= ceiling<TestType>());
      CHECK(rel_rms(y.final_state, exact.final_state) <= ceiling<TestType>());
    }
  };
  for (const Index N : {1, 3, 4, 16, 17}) check({.B = 2, .T = 20, .D = 5, .N = N});
  for (const Index D : {1, 7, 8, 16, 17, 33}) check({.T = 20, .D = D});
  for (const Index G : {2, 3, 6}) check({.B = 2, .T = 20, .D = 18 * G / 3, .G = G, .N = 3});
  for (const Index T : {0, 1, 2, 6, 7, 8, 31, 32, 33, 63, 64, 65, 131}) check({.T = T, .D = 3, .N = 3});
  check({.T = 40, .D = 1000, .N = 3});
  check({.B = 3, .T = 40, .D = 1100, .G = 2, .N = 3});
}

// Every dt with every A: from decays that round to 1 to decays that underflow. Each token multiplies a state
// by a decay that is off by at most 3 epsilon (the product dt A, its exponential, and the multiplication
// itself), hence 3 T epsilon.
TEMPLATE_TEST_CASE("a sweep of dt and A", "", float, double) {
  const double eps = double(std::numeric_limits<TestType>::epsilon());
  const Index T = 67;
  double worst = 0;
  for (const double dt : {1e-6, 1e-4, 1e-2, 1e-1, 1., 1e1, 1e3}) {
    ScanProblem<double> x = random_scan(std::uint64_t(1 / dt), {.T = T, .D = 10, .N = 4});
    Random random(7);
    for (double& delta : x.delta.values) delta = dt * random.uniform(0.5, 1);
    x.delta_bias = {};
    x.delta_softplus = false;
    for (std::size_t i = 0; i < x.A.values.size(); ++i) x.A.values[i] = -std::pow(10., double(i / 4) - 3);
    x = x.as<float>().as<double>();
    const ScanResults<long double> exact = oracle(x);
    const ScanResults<TestType> y = examples::run(x.as<TestType>(), scan_recurrent());
    const double out = rel_rms(y.out, exact.out), state = rel_rms(y.final_state, exact.final_state);
    INFO("dt " << dt);
    CHECK(out <= 3 * double(T) * eps);
    CHECK(state <= 3 * double(T) * eps);
    for (const Index C : {1, 16, 64}) {
      const ScanResults<TestType> chunked = examples::run(x.as<TestType>(), scan_chunk(C));
      const double ratio =
          std::max(rel_rms(chunked.out, exact.out) / budget<TestType>(out),
                   rel_rms(chunked.final_state, exact.final_state) / budget<TestType>(state));
      CHECK(ratio <= 1);
      worst = std::max(worst, ratio);
    }
  }
  WARN("the chunk form's largest error, in units of its budget: " << worst);
}

TEST_CASE("what underflows is exactly 0, and dt = 0 is no time") {
  ScanProblem<double> x = random_scan(1, {.T = 70, .D = 20, .N = 3});
  x.D = x.z = x.delta_bias = {};
  x.delta_softplus = false;
  const double rates[] = {-1e6, -1e38, -infinity};
  for (std::size_t i = 0; i < x.A.values.size(); ++i) x.A.values[i] = rates[i % 3];
  for (const double dt : {1e3, 1., 1e-3}) {
    std::fill(x.delta.values.begin(), x.delta.values.end(), float(dt));
    for (const ScanOptions& options : {scan_recurrent(), scan_chunk(16)}) {
      const ScanResults<float> y = examples::run(x.as<float>(), options);
      for (std::size_t i = 0; i < y.final_state.values.size(); ++i) {
        const std::size_t d = i / 3, last_u = 69 * 20 + d, last_B = 69 * 3 + i % 3;
        CHECK(y.final_state.values[i] == float(dt) * float(x.u.values[last_u]) * float(x.B.values[last_B]));
      }
    }
  }
  std::fill(x.delta.values.begin(), x.delta.values.end(), 0.);
  for (const ScanOptions& options : {scan_recurrent(), scan_chunk(16)})
    CHECK(equal_values(examples::run(x.as<float>(), options).final_state, cast<float>(x.initial_state)));

  // Softplus of what no exponential can be taken of.
  x.delta_softplus = true;
  std::fill(x.A.values.begin(), x.A.values.end(), -1.);
  for (const double delta : {-1e30, -200., 200., 1e30}) {
    std::fill(x.delta.values.begin(), x.delta.values.end(), float(delta));
    const ScanResults<float> y = examples::run(x.as<float>(), {});
    CHECK(rel_rms(y.final_state, oracle(x.as<float>().as<double>()).final_state) <= 3e-6);
  }
}

TEST_CASE("splitting at every token, the state carried") {
  const ScanProblem<float> x = random_scan(3, {.T = 70, .D = 19, .N = 5}).as<float>();
  const ScanResults<float> whole = examples::run(x, scan_recurrent());
  const ScanResults<long double> exact = oracle(x.as<double>());
  for (Index t = 0; t <= 70; ++t) {
    const auto split = [&](const ScanOptions& first, const ScanOptions& second) {
      const ScanResults<float> a = examples::run(slice(x, 0, t), first);
      ScanProblem<float> rest = slice(x, t, 70);
      rest.initial_state = a.final_state;
      ScanResults<float> b = examples::run(rest, second);
      b.out.values.insert(b.out.values.begin(), a.out.values.begin(), a.out.values.end());
      b.out.shape[1] = 70;
      return b;
    };
    CHECK(equal_values(split(scan_recurrent(), scan_recurrent()), whole));
    CHECK(rel_rms(split(scan_recurrent(), scan_chunk(16)).out, exact.out) <= 3e-6);
    CHECK(rel_rms(split(scan_chunk(16), scan_chunk(9)).final_state, exact.final_state) <= 3e-6);
  }
}

TEST_CASE("no output depends on a later token") {
  const ScanProblem<float> x = random_scan(4, {.B = 2, .T = 40, .D = 18, .G = 2, .N = 3}).as<float>();
  for (const ScanOptions& options : {scan_recurrent(), scan_chunk(16)}) {
    const ScanResults<float> y = examples::run(x, options);
    for (const Index P : {0, 1, 15, 16, 17, 39}) {
      ScanProblem<float> edited = x;
      for (Index b = 0; b < 2; ++b) {
        for (auto* a : {&edited.u, &edited.B, &edited.C, &edited.z, &edited.delta}) {
          const Index row = Index(a->values.size()) / 80;
          for (Index i = (b * 40 + P) * row; i < (b + 1) * 40 * row; ++i)
            a->values[std::size_t(i)] = a == &edited.delta ? 5.f : std::nanf("");
        }
      }
      const ScanResults<float> z = examples::run(edited, options);
      bool same = true, differs = false;
      for (Index i = 0; i < Index(y.out.values.size()); ++i) {
        const bool equal = y.out.values[std::size_t(i)] == z.out.values[std::size_t(i)];
        (i / 18 % 40 < P ? same : differs) &= equal;
        differs |= i / 18 % 40 >= P && !equal;
      }
      CHECK(same);
      CHECK(differs);
    }
  }
}

TEST_CASE("an absent input is its neutral value") {
  ScanProblem<float> x = random_scan(5, {.B = 2, .T = 20, .D = 17, .N = 3}).as<float>();
  for (auto input :
       {&ScanProblem<float>::D, &ScanProblem<float>::delta_bias, &ScanProblem<float>::initial_state}) {
    ScanProblem<float> absent = x, zero = x;
    absent.*input = {};
    std::fill((zero.*input).values.begin(), (zero.*input).values.end(), 0.f);
    for (const ScanOptions& options : {scan_recurrent(), scan_chunk(6)})
      CHECK(equal_values(examples::run(absent, options), examples::run(zero, options)));
  }
}

TEST_CASE("steps are the recurrence, with the state in place") {
  const ScanProblem<float> x = random_scan(6, {.T = 12, .D = 35, .N = 5}).as<float>();
  const ScanResults<float> whole = examples::run(x, scan_recurrent());
  ScanResults<float> y{examples::unwritten<float>(x.u.shape), x.initial_state};
  for (Index t = 0; t < 12; ++t) {
    momentum_delta::ScanInputs<float> in = x.inputs();
    for (auto* view : {&in.u, &in.delta, &in.z}) *view = token_of(*view, t);
    for (auto* view : {&in.B, &in.C}) *view = token_of(*view, t);
    in.initial_state = {};
    momentum_delta::scan_step(in, y.outputs().final_state, token_of(y.outputs().out, t));
  }
  CHECK(equal_values(y, whole));

  ScanProblem<float> in_place = x;
  momentum_delta::ScanOutputs<float> out = y.outputs();
  out.final_state = in_place.initial_state.view<momentum_delta::ArrayView<float, 3>>();
  momentum_delta::scan_forward(in_place.inputs(), out, scan_chunk(5));
  CHECK(equal_values(in_place.initial_state, examples::run(x, scan_chunk(5)).final_state));
}

TEST_CASE("rows apart in memory, and gaps between them left alone") {
  const ScanProblem<float> x = random_scan(8, {.B = 2, .T = 9, .D = 5, .N = 3}).as<float>();
  std::vector<float> u(2 * 9 * 11, 99.f), out(u);
  for (Index i = 0; i < 18; ++i) std::copy_n(x.u.values.begin() + i * 5, 5, u.begin() + i * 11);
  momentum_delta::ScanInputs<float> in = x.inputs();
  in.u = {u.data(), {2, 9, 5}, {9 * 11, 11, 1}};
  momentum_delta::scan_forward(in, {.out = {out.data(), {2, 9, 5}, {9 * 11, 11, 1}}});
  const ScanResults<float> y = examples::run(x, {});
  for (Index i = 0; i < 18 * 11; ++i)
    CHECK(out[std::size_t(i)] == (i % 11 < 5 ? y.out.values[std::size_t(i / 11 * 5 + i % 11)] : 99.f));
}
