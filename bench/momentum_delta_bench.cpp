// Time per token and head of forward(): forward/<algorithm>/<scalar>/K:../V:../chunk:.. (0: default).
#include <benchmark/benchmark.h>

#include <momentum_delta/momentum_delta.hpp>
#include <string>

namespace {

namespace md = momentum_delta;

template <class Scalar>
void forward(benchmark::State& state, md::Algorithm algorithm, md::Index K, md::Index V,
             md::Index chunk_size) {
  using Rows = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Gate = Eigen::Matrix<Scalar, Eigen::Dynamic, 1>;
  const md::Index T = 2048;
  const Rows q = Rows::Random(T, K), v = Rows::Random(T, V), k = Rows::Random(T, K).rowwise().normalized();
  const Gate log_alpha = Gate::Constant(T, Scalar(-0.01)), log_mu = Gate::Constant(T, Scalar(-0.5));
  const Rows p = k * std::exp(Scalar(-0.01));
  Rows o(T, V);
  const md::Inputs<Scalar> x{.q = q, .k = k, .v = v, .p = p, .log_alpha = log_alpha, .log_mu = log_mu};
  md::Options options{.algorithm = algorithm};
  if (chunk_size > 0) options.chunk_size = chunk_size;
  for (auto _ : state) {
    md::forward(x, {.o = o}, options);
    benchmark::DoNotOptimize(o.data());
    benchmark::ClobberMemory();
  }
  const double tokens = double(T) * double(state.iterations());
  state.counters["ns_per_token_head"] =
      benchmark::Counter(tokens * 1e-9, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["GFLOP/s"] =  // 12 K V useful operations a token and head
      benchmark::Counter(tokens * 12e-9 * double(K * V), benchmark::Counter::kIsRate);
}

template <class Scalar>
void add(const std::string& scalar) {
  struct Shape {
    md::Index K, V;
  };
  for (const Shape s : {Shape{64, 64}, {128, 128}, {128, 256}, {256, 512}}) {
    const auto name = [&](const std::string& algorithm, md::Index chunk_size) {
      return "forward/" + algorithm + "/" + scalar + "/K:" + std::to_string(s.K) +
             "/V:" + std::to_string(s.V) + "/chunk:" + std::to_string(chunk_size);
    };
    const auto add_one = [&](const std::string& label, md::Algorithm algorithm, md::Index chunk_size) {
      benchmark::RegisterBenchmark(name(label, chunk_size).c_str(), forward<Scalar>, algorithm, s.K, s.V,
                                   chunk_size);
    };
    add_one("automatic", md::Algorithm::automatic, 0);
    add_one("recurrent", md::Algorithm::recurrent, 0);
    for (const md::Index chunk_size : {16, 32, 64, 128}) add_one("chunk", md::Algorithm::chunk, chunk_size);
  }
}

}  // namespace

int main(int argc, char** argv) {
  add<float>("float");
  add<double>("double");
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
