// The least that needs all that the library needs: its headers, C++20, Eigen, threads.
#include <momentum_delta/momentum_delta.hpp>

int main() {
  namespace md = momentum_delta;
  Eigen::Vector2f y;
  md::ThreadPool pool(2);
  pool.run(2, [&](md::Index i, int) { y[i] = md::sigmoid(static_cast<float>(i)); });
  return y[0] == 0.5f && y[1] > 0.731f && y[1] < 0.732f ? 0 : 1;
}
