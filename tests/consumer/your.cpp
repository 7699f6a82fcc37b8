// The least that needs all that the library needs: its headers, C++20, Eigen, threads.
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>

int main() {
  namespace md = momentum_delta;
  Eigen::Matrix<float, 2, 2, Eigen::RowMajor> x{{3, 4}, {0, -2}};
  md::ThreadPool pool(2);
  pool.run(2, [&](md::Index i, int) { md::l2_normalize<float>(x.row(i), x.row(i)); });
  std::cout << x << "\n";
  return std::abs(x(0, 1) - 0.8f) < 1e-6f && std::abs(x(1, 1) + 1.0f) < 1e-6f ? 0 : 1;
}
