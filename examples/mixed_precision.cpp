// Mixed precision: q, k, v and o stored in bfloat16, computed in float. What is lost is the rounding of the
// inputs and one rounding of o.
#include <Eigen/Core>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>

template <class Scalar>
using Rows = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Eigen::bfloat16;

int main() {
  namespace md = momentum_delta;
  const int T = 200, K = 32, V = 32;
  const Rows<float> q = Rows<float>::Random(T, K), k = Rows<float>::Random(T, K).rowwise().normalized();
  const Rows<float> v = Rows<float>::Random(T, V);
  const Eigen::VectorXf log_mu = Eigen::VectorXf::Constant(T, -0.5f);  // gates and states stay in float

  const Rows<bfloat16> q16 = q.cast<bfloat16>(), k16 = k.cast<bfloat16>(), v16 = v.cast<bfloat16>();
  Rows<bfloat16> o16(T, V);
  Rows<float> S(K, V), M(K, V);
  md::forward(md::Inputs<float, bfloat16>{.q = q16, .k = k16, .v = v16, .log_mu = log_mu},
              {.o = o16, .final_S = S, .final_M = M});

  // In float on the inputs as bfloat16 holds them: the same values, rounded once to nearest even.
  const Rows<float> q32 = q16.cast<float>(), k32 = k16.cast<float>(), v32 = v16.cast<float>();
  Rows<float> o(T, V), exact(T, V);
  md::forward(md::Inputs<float>{.q = q32, .k = k32, .v = v32, .log_mu = log_mu}, {.o = o});
  const auto different = (o16.array() != o.cast<bfloat16>().array()).count();
  std::cout << different << " of " << o.size() << " elements differ from the float result, rounded once\n";

  md::forward(md::Inputs<float>{.q = q, .k = k, .v = v, .log_mu = log_mu}, {.o = exact});
  std::cout << "rounding the inputs changes o by " << (o - exact).norm() / exact.norm() << " of its norm\n";
}
