// Prefill: a whole sequence of one head through the chunk form, checked against the recurrence.
#include <Eigen/Core>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>

int main() {
  namespace md = momentum_delta;
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int T = 200, K = 32, V = 16;
  const Rows q = Rows::Random(T, K), k = Rows::Random(T, K).rowwise().normalized(), v = Rows::Random(T, V);
  const Eigen::VectorXf log_alpha = Eigen::VectorXf::Constant(T, -0.01f);  // natural logs, <= 0
  const Eigen::VectorXf log_mu = Eigen::VectorXf::Constant(T, -2.0f);      // mu = 0.135
  const Rows p = k.array().colwise() * log_alpha.array().exp();  // the vector that reads S, as it is used

  Rows o(T, V), S(K, V), M(K, V), expected(T, V);
  const md::Inputs<float> x{.q = q, .k = k, .v = v, .p = p, .log_alpha = log_alpha, .log_mu = log_mu};
  md::forward(x, {.o = o, .final_S = S, .final_M = M}, {.algorithm = md::Algorithm::chunk, .chunk_size = 64});
  md::forward(x, {.o = expected}, {.algorithm = md::Algorithm::recurrent});

  std::cout << "|o - recurrence| / |recurrence| = " << (o - expected).norm() / expected.norm() << "\n";
}
