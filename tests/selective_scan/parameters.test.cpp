#include <momentum_delta/selective_scan/parameters.hpp>

#include "../support/catch.hpp"
#include "../support/problem.hpp"

using namespace test;
namespace md = momentum_delta;
using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

TEST_CASE("S4D-real: A_n = -(n + 1), and its gradient by A_log") {
  Rows A_log(3, 5), A(3, 5), dA_log(3, 5);
  md::initialize_A_log<float>(A_log);
  md::negative_exp<float>(A_log, A);
  for (int d = 0; d < 3; ++d)
    for (int n = 0; n < 5; ++n) CHECK(std::abs(A(d, n) + float(n + 1)) <= 1e-6f * float(n + 1));
  const Rows dA = Rows::Random(3, 5);
  md::negative_exp_backward<float>(A, dA, dA_log);
  CHECK(dA_log == Rows(A.cwiseProduct(dA)));
  md::negative_exp_backward<float>(A, dA, dA_log, true);
  CHECK(dA_log == Rows(2 * A.cwiseProduct(dA)));
  md::negative_exp<float>(A_log, A_log);  // in place
  CHECK(A_log == A);

  Rows wrong(3, 4);
  CHECK_THROWS_AS(md::negative_exp<float>(A_log, wrong), std::invalid_argument);
  CHECK_THROWS_AS(md::negative_exp_backward<float>(A, wrong, dA_log), std::invalid_argument);
}

TEST_CASE("the initial bias makes dt log-uniform") {
  Random random(1);
  const int D = 20000;
  Eigen::VectorXd bias(D);
  md::initialize_delta_bias<double>(bias, [&] { return random.uniform(); });
  double below = 0, mean = 0;
  for (int d = 0; d < D; ++d) {
    const double dt = md::softplus(bias[d]);
    REQUIRE(dt >= 1e-3 * (1 - 1e-12));
    REQUIRE(dt <= 0.1 * (1 + 1e-12));
    below += dt < 1e-2;
    mean += std::log(dt);
  }
  // Half of them below the geometric middle; 5 standard deviations of either figure.
  CHECK(std::abs(below / D - 0.5) < 5 * 0.5 / std::sqrt(double(D)));
  CHECK(std::abs(mean / D - std::log(1e-2)) < 5 * std::log(100.) / std::sqrt(12. * D));

  const auto uniform = [] { return 0.5; };
  CHECK_THROWS_AS(md::initialize_delta_bias<double>(bias, uniform, 0), std::invalid_argument);
  CHECK_THROWS_AS(md::initialize_delta_bias<double>(bias, uniform, 0.1, 0.01), std::invalid_argument);
  CHECK_THROWS_AS(md::initialize_delta_bias<double>(bias, uniform, 0.1, infinity), std::invalid_argument);
}
