// Threads: one call shared out by a ThreadPool or by OpenMP gives the bits that one thread gives.
#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>
#include <vector>

namespace md = momentum_delta;

int main() {
  const md::Index B = 1, T = 512, H = 6, K = 64, V = 64;
  const auto random = [](md::Index size, float low, float high) {
    std::vector<float> x(static_cast<std::size_t>(size));
    for (float& value : x) value = Eigen::internal::random<float>(low, high);
    return x;
  };
  const std::vector<float> q = random(B * T * H * K, -1, 1), k = random(B * T * H * K, -0.1f, 0.1f);
  const std::vector<float> v = random(B * T * H * V, -1, 1), log_mu = random(B * T * H, -1, 0);
  const md::Inputs<float> x{.q = {q.data(), {B, T, H, K}},
                            .k = {k.data(), {B, T, H, K}},
                            .v = {v.data(), {B, T, H, V}},
                            .log_mu = {log_mu.data(), {B, T, H}}};
  std::vector<float> o(v.size()), expected(v.size());
  md::Workspace workspace;  // one for each thread that calls forward(): the executor's threads share it

  // The best time of several calls, in seconds.
  const auto run = [&](md::Executor& executor, std::vector<float>& out) {
    double best = 1e9;
    for (int call = 0; call < 3; ++call) {
      const auto start = std::chrono::steady_clock::now();
      md::forward(x, {.o = {out.data(), {B, T, H, V}}}, {.executor = &executor, .workspace = &workspace});
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
  };
  md::SerialExecutor serial;
  const double alone = run(serial, expected);
  const auto compare = [&](const char* name, md::Executor& executor) {
    std::fill(o.begin(), o.end(), 0.0f);
    const double time = run(executor, o);
    std::cout << name << ", " << executor.threads() << " threads: " << (o == expected ? "same" : "other")
              << " bits, " << alone / time << " times as fast\n";
  };
  for (const int threads : {2, 4}) {
    md::ThreadPool pool(threads);  // kept for as long as there are calls: starting threads takes time
    compare("ThreadPool", pool);
  }
#ifdef _OPENMP
  md::OpenMPExecutor openmp(2);
  compare("OpenMP", openmp);
#endif
}
