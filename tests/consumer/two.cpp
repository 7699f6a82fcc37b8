#include <momentum_delta/momentum_delta.hpp>

float other(Eigen::Index T);

template <class Scalar>
Scalar run(Eigen::Index T) {
  using Rows = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Rows q = Rows::Zero(T, 2);
  const Rows k = Rows::Zero(T, 2), v = Rows::Zero(T, 3);
  const Eigen::Matrix<Scalar, Eigen::Dynamic, 1> log_mu = -Eigen::Matrix<Scalar, Eigen::Dynamic, 1>::Ones(T);
  Rows o(T, 3), S(2, 3), M(2, 3);
  const momentum_delta::Inputs<Scalar> x{.q = q, .k = k, .v = v, .log_mu = log_mu};
  momentum_delta::forward(x, {.o = o, .final_S = S, .final_M = M});
  momentum_delta::forward<16>(x, {.o = o});
  Rows dv(T, 3);
  momentum_delta::Saved<Scalar> saved;
  momentum_delta::forward(x, {.o = o}, saved);
  momentum_delta::backward(x, saved, {.do_ = v}, {.dv = dv});
  momentum_delta::l2_normalize<Scalar>(q, q);
  // In place, with the state's names spelled in another translation unit than one.cpp's step.
  momentum_delta::forward(
      momentum_delta::Inputs<Scalar>{.q = q, .k = k, .v = v, .initial_S = S, .initial_M = M},
      {.o = o, .final_S = S, .final_M = M});
  momentum_delta::step(momentum_delta::Inputs<Scalar>{.q = q.row(0), .k = k.row(0), .v = v.row(0)}, S, M,
                       o.row(0));
  return o.sum();
}

float other(Eigen::Index T) {
  return run<float>(T) + static_cast<float>(run<double>(T) + static_cast<double>(run<long double>(T)));
}
