// Packed sequences: three of different lengths in one call, end to end and without padding, checked against a
// call each.
#include <Eigen/Core>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>

int main() {
  namespace md = momentum_delta;
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int K = 16, V = 24, N = 3;
  const md::Index cu_seqlens[N + 1] = {0, 7, 107, 140};  // sequence n: from [n] up to [n + 1]
  const md::Index T = cu_seqlens[N];
  const Rows q = Rows::Random(T, K), k = Rows::Random(T, K).rowwise().normalized(), v = Rows::Random(T, V);
  const Eigen::VectorXf log_mu = Eigen::VectorXf::Constant(T, -0.5f);

  Rows o(T, V), S(N * K, V), M(N * K, V);  // a final state for each sequence, one below the other
  const md::StateView<float> final_S(S.data(), {N, 1, K, V}), final_M(M.data(), {N, 1, K, V});
  md::forward(md::Inputs<float>{.q = q, .k = k, .v = v, .log_mu = log_mu, .cu_seqlens = cu_seqlens},
              {.o = o, .final_S = final_S, .final_M = final_M});

  Rows expected_o(T, V), expected_S(N * K, V), expected_M(N * K, V);
  for (int n = 0; n < N; ++n) {
    const md::Index begin = cu_seqlens[n], count = cu_seqlens[n + 1] - begin;
    md::forward(md::Inputs<float>{.q = q.middleRows(begin, count),
                                  .k = k.middleRows(begin, count),
                                  .v = v.middleRows(begin, count),
                                  .log_mu = log_mu.segment(begin, count)},
                {.o = expected_o.middleRows(begin, count),
                 .final_S = expected_S.middleRows(n * K, K),
                 .final_M = expected_M.middleRows(n * K, K)});
  }
  std::cout << "packed - separate, relative: o " << (o - expected_o).norm() / expected_o.norm() << ", S "
            << (S - expected_S).norm() / expected_S.norm() << ", M "
            << (M - expected_M).norm() / expected_M.norm() << "\n";
}
