// Mamba's selective scan: prefill, then decoding from the state that it leaves, checked against one whole
// scan.
#include <Eigen/Core>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>

int main() {
  namespace md = momentum_delta;
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int T = 200, prompt = 150, D = 48, N = 16;  // tokens, channels, states of a channel
  const Rows u = Rows::Random(T, D), delta = Rows::Random(T, D), z = Rows::Random(T, D);
  const Rows B = Rows::Random(T, N), C = Rows::Random(T, N);
  Rows A(D, N), state(D, N), out(T, D), expected(T, D);
  Eigen::VectorXf delta_bias(D);
  md::initialize_A_log<float>(A);  // A_n = -(n + 1), as its log
  md::negative_exp<float>(A, A);   // so that exp(dt A) decays
  md::initialize_delta_bias<float>(delta_bias, [] { return (Eigen::internal::random<float>() + 1) / 2; });

  const auto tokens = [&](int t, int n) {
    return md::ScanInputs<float>{.u = u.middleRows(t, n),
                                 .delta = delta.middleRows(t, n),
                                 .A = A,
                                 .B = B.middleRows(t, n),
                                 .C = C.middleRows(t, n),
                                 .z = z.middleRows(t, n),
                                 .delta_bias = delta_bias};
  };
  md::scan_forward(tokens(0, prompt), {.out = out.topRows(prompt), .final_state = state});
  for (int t = prompt; t < T; ++t) md::scan_step(tokens(t, 1), state, out.row(t));

  md::scan_forward(tokens(0, T), {.out = expected}, {.algorithm = md::Algorithm::chunk, .chunk_size = 64});
  std::cout << "|out - chunk form| / |chunk form| = " << (out - expected).norm() / expected.norm() << "\n";
}
