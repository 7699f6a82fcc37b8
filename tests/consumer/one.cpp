// Two translation units that include everything: no warning, and nothing defined twice.
#include <momentum_delta/momentum_delta.hpp>

float other(Eigen::Index T);

int main() {
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Rows x = Rows::Zero(1, 2);
  Rows S = Rows::Zero(2, 2), M = Rows::Zero(2, 2), o(1, 2);
  momentum_delta::step(momentum_delta::Inputs<float>{.q = x, .k = x, .v = x}, S, M, o);
  return other(3) == o(0, 0) ? 0 : 1;
}
