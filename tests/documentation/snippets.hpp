// What the documentation's snippets use without declaring it: one head of one sequence as Eigen matrices, its
// gradients, and the calls' arguments made of them.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>
#include <random>
#include <thread>
#include <vector>

namespace md = momentum_delta;
using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Rows16 = Eigen::Matrix<Eigen::bfloat16, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Gate = Eigen::VectorXf;

// Each snippet has its own, and may assign to them or hide them.
struct Tensors {
  int T = 48, K = 8, V = 12;
  Rows q = Rows::Random(T, K), k = Rows::Random(T, K).rowwise().normalized(), v = Rows::Random(T, V),
       p = 0.9f * k;
  Gate log_alpha = Gate::Constant(T, std::log(0.9f)), log_mu = Gate::Constant(T, -1),
       beta = Gate::Constant(T, 0.8f), eta = Gate::Ones(T);
  Rows16 q16 = q.cast<Eigen::bfloat16>(), k16 = k.cast<Eigen::bfloat16>(), v16 = v.cast<Eigen::bfloat16>();

  Rows o = Rows(T, V), S = Rows::Zero(K, V), M = Rows::Zero(K, V);
  Rows16 o16 = Rows16(T, V);

  Rows target = Rows::Random(T, V), dq = Rows(T, K), dk = Rows(T, K), dv = Rows(T, V), dp = Rows(T, K);
  Gate dlog_alpha = Gate(T), dlog_mu = Gate(T), dbeta = Gate(T), deta = Gate(T);

  md::Inputs<float> x{
      .q = q, .k = k, .v = v, .p = p, .log_alpha = log_alpha, .log_mu = log_mu, .beta = beta, .eta = eta};
  md::Outputs<float> y{.o = o, .final_S = S, .final_M = M};

  Tensors() = default;
  Tensors(const Tensors&) = delete;  // x and y are views
};

template <class Snippet>
void run(const char* where) {
  std::cout << where << std::endl;  // so that the last line says what an exception came from
  Snippet().run();
}
