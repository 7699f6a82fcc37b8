// What the documentation's snippets use without declaring it. Each snippet has its own, and may assign to it
// or hide it.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <deque>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "../examples/kernels/kernels.hpp"

namespace md = momentum_delta;
using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Rows16 = Eigen::Matrix<Eigen::bfloat16, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Gate = Eigen::VectorXf;

// One head of one sequence as Eigen matrices, its gradients, and the calls' arguments made of them.
struct Matrices {
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

  Matrices() = default;
  Matrices(const Matrices&) = delete;  // x and y are views
};

// Batches as another framework holds them: pointers to contiguous [B, T, H, D], gates [B, T, H] and a state
// [2, B, H, K, V].
class Pointers {
  std::deque<std::vector<float>> memory_;  // first: the pointers point into it
  std::mt19937 random_{1};
  std::uniform_real_distribution<float> uniform_;

 public:
  md::Index B = 2, T = 20, H = 3, K = 8, V = 12;

  float *q = keys(), *k = keys(), *v = values(), *p = keys(), *o = values(), *unit_q = keys(),
        *unit_k = keys();
  float *log_alpha = gate(-0.3f), *log_mu = gate(-1), *beta = gate(0.1f), *eta = gate(1);
  float* state = make(2 * B * H * K * V, 0, 0);
  float *do_ = values(), *dq = keys(), *dk = keys(), *dv = values(), *dp = keys();
  float *dlog_alpha = gate(0), *dlog_mu = gate(0), *dbeta = gate(0), *deta = gate(0);

  Pointers() = default;
  Pointers(const Pointers&) = delete;

 private:
  float* make(md::Index size, float low, float high) {
    memory_.emplace_back(std::size_t(size));
    for (float& x : memory_.back()) x = low + (high - low) * uniform_(random_);
    return memory_.back().data();
  }
  float* keys() { return make(B * T * H * K, -1, 1); }
  float* values() { return make(B * T * H * V, -1, 1); }
  float* gate(float value) { return make(B * T * H, value, value); }
};

template <class Snippet>
void run(const char* where) {
  std::cout << where << std::endl;  // so that the last line says what an exception came from
  Snippet().run();
}
