// Training: fit a random teacher's outputs by gradient descent on q, k, v and the gates.
#include <Eigen/Core>
#include <cstdio>
#include <momentum_delta/momentum_delta.hpp>

namespace md = momentum_delta;
using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Gate = Eigen::VectorXf;

constexpr int T = 64, K = 16, V = 16;

// What a head learns, and the arguments of the rule made from it. Every value of raw_alpha and raw_mu is
// legal.
struct Head {
  Rows raw_q = Rows::Random(T, K), raw_k = Rows::Random(T, K), v = Rows::Random(T, V);
  Gate raw_alpha = Gate::Random(T).array() - 3, raw_mu = Gate::Random(T);
  Rows q = Rows(T, K), k = Rows(T, K), p = Rows(T, K);
  Gate log_alpha, log_mu;

  md::Inputs<float> inputs() {
    md::l2_normalize<float>(raw_q, q);
    md::l2_normalize<float>(raw_k, k);
    log_alpha = -raw_alpha.array().exp();
    log_mu = -raw_mu.array().exp();
    md::decay_keys<float>(k, log_alpha, p);
    return {.q = q, .k = k, .v = v, .p = p, .log_alpha = log_alpha, .log_mu = log_mu, .scale = 1.0f};
  }
};

int main() {
  Head teacher, student;
  Rows target(T, V), o(T, V), dq(T, K), dk(T, K), dv(T, V), dp(T, K);
  Gate dlog_alpha(T), dlog_mu(T);
  md::forward(teacher.inputs(), {.o = target});

  md::Saved<float> saved;
  const float rate = 0.1f;
  for (int iteration = 0; iteration <= 300; ++iteration) {
    const md::Inputs<float> x = student.inputs();
    md::forward(x, {.o = o}, saved);
    const Rows error = o - target;  // the gradient of half the squared distance
    if (iteration % 50 == 0)
      std::printf("iteration %3d  loss %.6f\n", iteration, error.squaredNorm() / (2 * T));

    md::backward(x, saved, {.do_ = error},
                 {.dq = dq, .dk = dk, .dv = dv, .dp = dp, .dlog_alpha = dlog_alpha, .dlog_mu = dlog_mu});
    md::decay_keys_backward<float>(student.k, student.log_alpha, dp, dk, dlog_alpha, /*accumulate=*/true);
    md::l2_normalize_backward<float>(student.raw_q, dq, dq);
    md::l2_normalize_backward<float>(student.raw_k, dk, dk);
    student.raw_q -= rate * dq;
    student.raw_k -= rate * dk;
    student.v -= rate * dv;
    student.raw_alpha.array() -= rate * dlog_alpha.array() * student.log_alpha.array();
    student.raw_mu.array() -= rate * dlog_mu.array() * student.log_mu.array();
  }
}
