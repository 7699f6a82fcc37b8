#include <momentum_delta/momentum_delta.hpp>

float other(Eigen::Index T);

template <class Scalar>
Scalar run(Eigen::Index T) {
  using Rows = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Rows q = Rows::Zero(T, 2), k = Rows::Zero(T, 2), v = Rows::Zero(T, 3);
  const Eigen::Matrix<Scalar, Eigen::Dynamic, 1> log_mu = -Eigen::Matrix<Scalar, Eigen::Dynamic, 1>::Ones(T);
  Rows o(T, 3), S(2, 3), M(2, 3);
  const momentum_delta::Inputs<Scalar> x{.q = q, .k = k, .v = v, .log_mu = log_mu};
  momentum_delta::forward(x, {.o = o, .final_S = S, .final_M = M});
  momentum_delta::forward<16>(x, {.o = o});
  momentum_delta::step(momentum_delta::Inputs<Scalar>{.q = q.row(0), .k = k.row(0), .v = v.row(0)}, S, M,
                       o.row(0));
  return o.sum();
}

float other(Eigen::Index T) {
  return run<float>(T) + static_cast<float>(run<double>(T) + static_cast<double>(run<long double>(T)));
}
