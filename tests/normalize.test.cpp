#include <momentum_delta/normalize.hpp>

#include <functional>

#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;
using momentum_delta::GateView;
using momentum_delta::TokenView;

namespace {

template <class Scalar>
Array<Scalar> random_array(std::uint64_t seed, std::vector<Index> shape) {
  Random random(seed);
  Array<Scalar> x = examples::zeros<Scalar>(std::move(shape));
  for (Scalar& value : x.values) value = Scalar(random.normal());
  return x;
}
template <class Scalar>
TokenView<const Scalar> in(const Array<Scalar>& x) {
  return x.template view<TokenView<const Scalar>>();
}
template <class Scalar>
TokenView<Scalar> out(Array<Scalar>& x) {
  return x.template view<TokenView<Scalar>>();
}

// f'(0), from five points: exact to 1e-13 or so where f changes on a scale of 1.
long double slope(const std::function<long double(long double)>& f) {
  const long double h = 1e-4L;
  return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h);
}

}  // namespace

TEMPLATE_TEST_CASE("l2_normalize is x / sqrt(|x|^2 + epsilon)", "", float, double) {
  Array<TestType> x = random_array<TestType>(1, {2, 5, 3, 7});
  std::fill_n(x.values.begin(), 7, TestType(0));
  for (int d = 0; d < 7; ++d) x.values[7 + std::size_t(d)] *= TestType(1e-5);  // epsilon counts
  const TestType huge = std::sqrt(std::numeric_limits<TestType>::max());
  for (int d = 0; d < 7; ++d) x.values[14 + std::size_t(d)] *= huge;  // the square overflows
  Array<TestType> y = examples::unwritten<TestType>(x.shape);
  momentum_delta::l2_normalize<TestType>(in(x), out(y));
  for (std::size_t row = 0; row < 30; ++row) {
    long double sum = 1e-6L;
    for (std::size_t d = 0; d < 7; ++d)
      sum += static_cast<long double>(x.values[7 * row + d]) * x.values[7 * row + d];
    for (std::size_t d = 0; d < 7; ++d) {
      const long double exact = x.values[7 * row + d] / std::sqrt(sum);
      CHECK(std::abs(y.values[7 * row + d] - exact) <=
            4 * std::numeric_limits<TestType>::epsilon() * std::abs(exact) + 1e-20L);
    }
  }
  Array<TestType> in_place = x;
  momentum_delta::l2_normalize<TestType>(in(in_place), out(in_place));
  CHECK(equal_values(in_place, y));
}

TEST_CASE("the gradient of l2_normalize, at ordinary, short and zero vectors") {
  Array<double> x = random_array<double>(2, {1, 4, 2, 3});
  for (std::size_t i = 0; i < 3; ++i) x.values[i] = 0;
  for (std::size_t i = 3; i < 6; ++i) x.values[i] *= 1e-3;
  const Array<double> dy = random_array<double>(3, x.shape);
  Array<double> dx = examples::unwritten<double>(x.shape);
  momentum_delta::l2_normalize_backward<double>(in(x), in(dy), out(dx));
  for (std::size_t i = 0; i < x.values.size(); ++i) {
    const std::size_t row = i / 3 * 3;
    const long double unit = row < 6 ? 1e-3L : 1;  // the scale on which this vector's length changes things
    const long double exact =
        slope([&](long double h) {
          long double sum = 1e-6L, loss = 0;
          const auto at = [&](std::size_t d) { return x.values[row + d] + (row + d == i ? h * unit : 0); };
          for (std::size_t d = 0; d < 3; ++d) sum += at(d) * at(d);
          for (std::size_t d = 0; d < 3; ++d) loss += dy.values[row + d] * at(d) / std::sqrt(sum);
          return loss;
        }) /
        unit;
    CHECK(std::abs(dx.values[i] - exact) <= 1e-11L * std::max(1 / unit, std::abs(exact)));
    if (row == 0) CHECK(std::abs(dx.values[i] - dy.values[i] * 1e3) < 1e-9);
  }
  Array<double> twice = dx;
  momentum_delta::l2_normalize_backward<double>(in(x), in(dy), out(twice), /*accumulate=*/true);
  for (std::size_t i = 0; i < dx.values.size(); ++i) CHECK(twice.values[i] == 2 * dx.values[i]);
  Array<double> in_place = dy;
  momentum_delta::l2_normalize_backward<double>(in(x), in(in_place), out(in_place));
  CHECK(equal_values(in_place, dx));
}

TEST_CASE("the gradient stays finite and right where squares overflow") {
  Array<float> x{{1, 1, 1, 2}, {3e30f, 4e30f}}, dy{{1, 1, 1, 2}, {1, 0}}, dx = dy;
  momentum_delta::l2_normalize_backward<float>(in(x), in(dy), out(dx));
  CHECK(std::abs(dx.values[0] / (0.64f / 5e30f) - 1) < 1e-5f);
  CHECK(std::abs(dx.values[1] / (-0.48f / 5e30f) - 1) < 1e-5f);
}

TEST_CASE("decay_keys and its gradient, grouped heads included") {
  const Array<double> k = random_array<double>(4, {2, 5, 2, 3});
  Array<double> log_alpha = random_array<double>(5, {2, 5, 6});
  for (double& value : log_alpha.values) value = -std::abs(value);
  log_alpha.values[7] = -infinity;
  const auto gates = log_alpha.view<GateView<const double>>();
  Array<double> p = examples::unwritten<double>({2, 5, 6, 3});
  momentum_delta::decay_keys<double>(in(k), gates, out(p));
  const Array<double> dp = random_array<double>(6, p.shape);
  Array<double> dk = examples::unwritten<double>(k.shape),
                dlog = examples::unwritten<double>(log_alpha.shape);
  momentum_delta::decay_keys_backward<double>(in(k), gates, in(dp), out(dk), dlog.view<GateView<double>>());

  Array<double> expected_dk = examples::zeros<double>(k.shape);
  for (std::size_t gate = 0; gate < 60; ++gate) {
    const double alpha = std::exp(log_alpha.values[gate]);
    double along = 0;
    for (std::size_t d = 0; d < 3; ++d) {
      const std::size_t key = (gate / 6 * 2 + gate % 6 / 3) * 3 + d;
      CHECK(std::abs(p.values[gate * 3 + d] - alpha * k.values[key]) < 1e-15);
      expected_dk.values[key] += alpha * dp.values[gate * 3 + d];
      along += k.values[key] * dp.values[gate * 3 + d];
    }
    CHECK(std::abs(dlog.values[gate] - alpha * along) < 1e-14);
  }
  CHECK(dlog.values[7] == 0);
  for (std::size_t i = 0; i < dk.values.size(); ++i)
    CHECK(std::abs(dk.values[i] - expected_dk.values[i]) < 1e-14);

  Array<double> dk2 = dk, dlog2 = dlog;
  momentum_delta::decay_keys_backward<double>(in(k), gates, in(dp), out(dk2), dlog2.view<GateView<double>>(),
                                              true);
  for (std::size_t i = 0; i < dk.values.size(); ++i)
    CHECK(std::abs(dk2.values[i] - 2 * dk.values[i]) < 1e-14);
  for (std::size_t i = 0; i < 60; ++i) CHECK(std::abs(dlog2.values[i] - 2 * dlog.values[i]) < 1e-14);
}

TEST_CASE("bad input to the helpers") {
  Array<float> x = random_array<float>(7, {1, 4, 2, 3}), y = x;
  Array<float> gates = examples::zeros<float>({1, 4, 2});
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "accepted";
  };
  const Array<float> before = y;
  auto shorter = out(y);
  shorter.shape[1] = 3;
  CHECK(message([&] { momentum_delta::l2_normalize<float>(in(x), shorter); }) ==
        "momentum_delta::l2_normalize: y has shape [1, 3, 2, 3], not [B, T, H, D] of x = [1, 4, 2, 3]");
  CHECK(message([&] { momentum_delta::l2_normalize<float>({}, out(y)); }) ==
        "momentum_delta::l2_normalize: x is missing; its shape is [B, T, H, D]");
  CHECK(message([&] { momentum_delta::l2_normalize<float>(in(x), out(y), 0.f); }) ==
        "momentum_delta::l2_normalize: epsilon = 0 is not finite and > 0");
  CHECK(message([&] { momentum_delta::l2_normalize_backward<float>(in(x), in(y), out(y), true); }) ==
        "momentum_delta::l2_normalize_backward: dx shares memory with dy");
  CHECK(message([&] { momentum_delta::l2_normalize_backward<float>(in(x), in(x), out(y), false, -1.f); }) ==
        "momentum_delta::l2_normalize_backward: epsilon = -1 is not finite and > 0");
  gates.values[5] = std::numeric_limits<float>::infinity();
  CHECK(message([&] {
          momentum_delta::decay_keys<float>(in(x), gates.view<GateView<const float>>(), out(y));
        }) == "momentum_delta::decay_keys: log_alpha[0, 2, 1] = inf is infinite");
  gates = examples::zeros<float>({1, 4, 3});
  CHECK(
      message(
          [&] { momentum_delta::decay_keys<float>(in(x), gates.view<GateView<const float>>(), out(y)); }) ==
      "momentum_delta::decay_keys: log_alpha has 3 heads, which is no positive multiple of the 2 heads of k");
  CHECK(equal_values(y, before));
}
