// Decoding: one token at a time, the state kept between calls.
#include <Eigen/Core>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>

int main() {
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int K = 8, V = 4, tokens = 5;
  Rows S = Rows::Zero(K, V), M = Rows::Zero(K, V), o(1, V);
  Eigen::VectorXf log_mu(1), beta(1);
  for (int t = 0; t < tokens; ++t) {
    const Rows q = Rows::Random(1, K), k = Rows::Random(1, K).normalized(), v = Rows::Random(1, V);
    log_mu << -0.5f;
    beta << 0.9f;
    momentum_delta::step(
        momentum_delta::Inputs<float>{.q = q, .k = k, .v = v, .log_mu = log_mu, .beta = beta}, S, M, o);
    std::cout << "o_" << t + 1 << " = " << o << "\n";
  }
}
