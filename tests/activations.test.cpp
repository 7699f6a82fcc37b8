#include <momentum_delta/activations.hpp>
#include <momentum_delta/detail/activation_rows.hpp>

#include <complex>
#include <vector>

#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;
namespace md = momentum_delta;

namespace {

long double exact_softplus(long double x) {
  return std::max(x, 0.0L) + std::log1p(std::exp(-std::abs(x)));
}
long double exact_sigmoid(long double x) {
  return 1 / (1 + std::exp(-x));
}

// From the smallest to the largest, of both signs.
template <class Scalar>
std::vector<Scalar> arguments() {
  std::vector<Scalar> x{0};
  for (Scalar a = std::numeric_limits<Scalar>::min(); std::isfinite(a); a *= Scalar(1.7))
    for (const Scalar sign : {1, -1}) x.push_back(sign * a);
  for (int i = -2000; i <= 2000; ++i) x.push_back(Scalar(i) / 16);
  return x;
}

template <class Scalar>
bool close(Scalar value, long double exact, int roundings) {
  using Limits = std::numeric_limits<Scalar>;
  return std::abs(value - exact) <= roundings * Limits::epsilon() * std::abs(exact) + Limits::min();
}

}  // namespace

TEMPLATE_TEST_CASE("softplus, sigmoid and silu, alone and by rows", "", float, double) {
  using Row = md::detail::Row<TestType>;
  for (const TestType x : arguments<TestType>()) {
    INFO("x = " << x);
    const Row row = Row::Constant(x);
    CHECK(close(md::softplus(x), exact_softplus(x), 4));
    CHECK(close(md::sigmoid(x), exact_sigmoid(x), 4));
    CHECK(close(md::silu(x), x * exact_sigmoid(x), 4));
    CHECK(close(md::detail::softplus_row<TestType>(row, md::detail::exp_of_minus_abs_row<TestType>(row))[1],
                exact_softplus(x), 6));
    CHECK(close(md::detail::sigmoid_row<TestType>(row)[1], exact_sigmoid(x), 6));
  }
}

TEMPLATE_TEST_CASE("softplus_inverse undoes softplus", "", float, double) {
  using Limits = std::numeric_limits<TestType>;
  for (TestType y = Limits::min() * 4; y < Limits::max() / 2; y *= TestType(1.3)) {
    INFO("y = " << y);
    // A relative error e of y stems from an error e y / sigmoid(x) of x, at least e and at most e y + 1.
    const TestType x = md::softplus_inverse(y);
    CHECK(std::abs(exact_softplus(x) - y) <=
          4 * Limits::epsilon() * y * std::max<long double>(1, std::abs(static_cast<long double>(x))));
  }
  CHECK(md::softplus_inverse(TestType(0)) == -Limits::infinity());
  CHECK(std::isnan(md::softplus_inverse(TestType(-1))));
}

TEST_CASE("the derivative of softplus is sigmoid, by complex step") {
  for (const double x : {-800., -30., -1., 0., 1e-3, 1., 30., 800.}) {
    const std::complex<double> y = md::softplus(std::complex<double>(x, 1e-100));
    INFO(x);
    CHECK(close(y.real(), exact_softplus(x), 4));
    CHECK(close(y.imag() * 1e100, exact_sigmoid(x), 4));
  }
}

// Of all 2^32 floats every 1021st that is in range.
TEST_CASE("a float decay of the scan is within its error and 0 below the smallest normal number") {
  using Row = md::detail::Row<float>;
  double worst = 0, worst_near_1 = 0;
  for (std::uint32_t bits = 0x00800000; bits < 0x7f800000; bits += 1021) {
    const float y = -std::bit_cast<float>(bits);  // a power of 2
    const float power = md::detail::decay_row<float>(Row::Ones(), Row::Constant(y))[3];
    const long double exact = std::exp2(static_cast<long double>(y));
    if (y < -126) {
      REQUIRE(power == 0);
      continue;
    }
    const int exponent = std::max(std::ilogb(static_cast<double>(exact)), -126);
    const double error = double(std::abs(power - exact)) / std::ldexp(1., exponent - 23);
    worst = std::max(worst, error);
    if (y >= -1 / 32.f) worst_near_1 = std::max(worst_near_1, error);
    const float x = -std::bit_cast<float>(bits);
    const float fast = md::detail::fast_decay_row<float>(Row::Constant(x))[5];
    if (x < md::detail::lowest_exponent<float>) {
      REQUIRE(fast == 0);
    } else {
      const long double e = std::exp(static_cast<long double>(x));
      REQUIRE(std::abs(fast - e) <= 1.5L * std::numeric_limits<float>::epsilon() * e);
    }
  }
  INFO(worst << ", near 1 " << worst_near_1);
  // Without a fused multiply-add the last product, at most 1 - sqrt(1/2), is rounded on its own: by up to
  // 2^-26, where a unit in the last place of the result is 2^-24.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  CHECK(worst <= 1);
#else
  CHECK(worst <= 1.25);
#endif
  CHECK(worst_near_1 <= 0.6);
}
