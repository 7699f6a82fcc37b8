// Time per token and head of forward(), of forward() and backward(), and of step(), beside what this machine
// can do. See README.md for the names, the counters and the commands.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <momentum_delta/momentum_delta.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../examples/kernels/kernels.hpp"
#include "machine.hpp"
#include "problem.hpp"
#include "scan.hpp"

namespace {

using namespace bench;

struct Case {
  Index K, V, T = 1;
  int threads = 1;
  md::Algorithm algorithm = md::Algorithm::automatic;
  std::optional<Index> chunk_size{};  // absent: the library's default
};

// A call over a sequence, with so many useful operations for each element of the state, token and head.
template <class Scalar, class Call>
void time_sequence(benchmark::State& state, const Case& c, double operations, const Call& call) {
  const auto [seconds, references] = time(
      state, c.threads, [] { return std::array{peak_flops<Scalar>(tries)}; }, call);
  const double token_heads = double(c.T * heads);
  state.counters["ns_per_token_head"] = seconds / token_heads * 1e9;
  state.counters["peak_GFLOP/s"] = references[0] * 1e-9;
  state.counters["peak_fraction"] =
      operations * double(c.K * c.V) * token_heads / (seconds * references[0] * c.threads);
}

template <class Scalar, class Storage>
void forward(benchmark::State& state, const Case& c) {
  Problem<Scalar, Storage> problem(c.T, c.K, c.V);
  md::ThreadPool pool(c.threads);
  md::Workspace workspace;
  const md::Options options{
      .algorithm = c.algorithm, .chunk_size = c.chunk_size, .executor = &pool, .workspace = &workspace};
  time_sequence<Scalar>(state, c, 12, [&] { md::forward(problem.inputs(), problem.outputs(), options); });
}

template <class Scalar, class Storage>
void training(benchmark::State& state, const Case& c) {
  Problem<Scalar, Storage> problem(c.T, c.K, c.V);
  Gradients<Scalar, Storage> gradients(problem);
  md::Saved<Scalar> saved(1, true);
  md::ThreadPool pool(c.threads);
  md::Workspace workspace;
  const md::Options backward_options{.executor = &pool, .workspace = &workspace};
  md::Options options = backward_options;
  options.algorithm = c.algorithm;
  options.chunk_size = c.chunk_size;
  time_sequence<Scalar>(state, c, 36, [&] {
    md::forward(problem.inputs(), problem.outputs(), saved, options);
    md::backward(problem.inputs(), saved, gradients.upstream(), gradients.views(), backward_options);
  });
}

template <class Scalar, class Storage>
void step(benchmark::State& state, const Case& c) {
  Problem<Scalar, Storage> problem(1, c.K, c.V);
  std::vector<Scalar> S(std::size_t(heads * c.K * c.V)), M = S;
  const md::StateView<Scalar> S_view(S.data(), {1, heads, c.K, c.V}), M_view(M.data(), {1, heads, c.K, c.V});
  md::ThreadPool pool(c.threads);
  md::Workspace workspace;
  const md::Options options{.executor = &pool, .workspace = &workspace};
  const std::size_t bytes = 2 * S.size() * sizeof(Scalar);
  WorkingSet memory(bytes);
  const auto [seconds, references] = time(
      state, c.threads,
      [&] {
        return std::array{memory.copy_rate(4 * tries, pool), memory.update_rate(4 * tries, pool)};
      },
      [&] { md::step(problem.inputs(), S_view, M_view, problem.outputs().o, options); });
  const double rate = 2 * double(bytes) / seconds;
  state.counters["ns_per_token_head"] = seconds / double(heads) * 1e9;
  state.counters["copy_GB/s"] = references[0] * 1e-9;
  state.counters["update_GB/s"] = references[1] * 1e-9;
  state.counters["bandwidth_fraction"] = rate / references[0];
  state.counters["update_fraction"] = rate / references[1];
}

using Function = void(benchmark::State&, const Case&);

// kind: up to the sizes, as forward/chunk/float.
void add(const std::string& kind, Function* function, const Case& c) {
  const auto part = [](const char* key, Index value) { return key + std::to_string(value); };
  const std::string name = kind + part("/K:", c.K) + part("/V:", c.V) + (c.T > 1 ? part("/T:", c.T) : "") +
                           (c.chunk_size ? part("/chunk:", *c.chunk_size) : "") +
                           part("/threads:", c.threads);
  benchmark::RegisterBenchmark(name.c_str(), function, c)->Unit(benchmark::kMicrosecond);
}

void add_sequence(const std::string& pass, const std::string& type, Function* function, Case c) {
  const auto add_form = [&](const char* form, md::Algorithm algorithm) {
    c.algorithm = algorithm;
    add(pass + form + type, function, c);
  };
  add_form("/automatic/", md::Algorithm::automatic);
  add_form("/recurrent/", md::Algorithm::recurrent);
  add_form("/chunk/", md::Algorithm::chunk);
  for (const Index chunk_size : {16, 32, 64, 128}) {
    c.chunk_size = chunk_size;
    add_form("/chunk/", md::Algorithm::chunk);
  }
}

// What there is for every type.
template <class Scalar, class Storage = Scalar>
void add_type(const std::string& type) {
  const int all = md::ThreadPool().threads();
  constexpr Index T = 2048;
  for (const Case& shape : {Case{64, 64}, Case{128, 128}, Case{128, 256}, Case{256, 512}}) {
    std::set<int> threads{1, all};
    if (shape.K == 128 && shape.V == 256)
      for (int n = 2; n <= std::min(all, 16); n *= 2) threads.insert(n);
    for (const int n : threads) {
      add_sequence("forward", type, forward<Scalar, Storage>, {shape.K, shape.V, T, n});
      add_sequence("training", type, training<Scalar, Storage>, {shape.K, shape.V, T, n});
    }
  }
  for (const int n : std::set{1, all}) add("step/" + type, step<Scalar, Storage>, {256, 512, 1, n});
}

// Is the cost linear in T?
void add_lengths() {
  for (Index T = 256; T <= 65536; T *= 4) {
    add("forward/recurrent/float", forward<float, float>, {128, 256, T, 1, md::Algorithm::recurrent});
    add("forward/chunk/float", forward<float, float>, {128, 256, T, 1, md::Algorithm::chunk});
  }
}

void add_context(const char* key, double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  benchmark::AddCustomContext(key, text);
}

void add_machine() {
  benchmark::AddCustomContext("Eigen_SIMD", Eigen::SimdInstructionSetsInUse());
#ifdef __VERSION__
  benchmark::AddCustomContext("compiler", __VERSION__);
#endif
  add_context("peak_float_GFLOP/s", peak_flops<float>(50) * 1e-9);  // bfloat16 is computed in float, too
  add_context("peak_double_GFLOP/s", peak_flops<double>(50) * 1e-9);
  md::SerialExecutor serial;
  {
    WorkingSet state(2 * std::size_t(heads) * 256 * 512 * sizeof(float));
    add_context("copy_step_float_GB/s", state.copy_rate(50, serial) * 1e-9);
    add_context("update_step_float_GB/s", state.update_rate(50, serial) * 1e-9);
  }
  WorkingSet large(large_working_set());
  add_context("large_MiB", double(large_working_set()) / (1 << 20));
  add_context("copy_large_GB/s", large.copy_rate(5, serial) * 1e-9);
  add_context("update_large_GB/s", large.update_rate(5, serial) * 1e-9);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_type<float>("float");
  add_type<double>("double");
  add_type<float, Eigen::bfloat16>("bfloat16");
  add_lengths();
  add_scans();
  add_machine();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
