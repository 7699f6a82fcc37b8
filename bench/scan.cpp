// Time per token and channel of scan_forward(), and of scan_forward() and scan_backward(), beside the time
// that their exponentials and multiply-adds alone would take. See README.md for the names and counters.
#include "scan.hpp"

#include <array>
#include <string>

#include "../examples/kernels/kernels.hpp"
#include "machine.hpp"
#include "problem.hpp"

namespace bench {
namespace {

// Exponentials of decays a second of one core: the library's, and Eigen's. The arguments come from the
// innermost cache and the results are added up, in independent chains.
template <class Scalar>
std::array<double, 2> exp_rates(int tries) {
  namespace detail = md::detail;
  using Row = detail::Row<Scalar>;
  constexpr Index rows = 64, W = detail::panel_width<Scalar>, repeats = 200;
  alignas(64) static Scalar dt[rows * W], rate[rows * W];
  for (Index i = 0; i < rows * W; ++i) {
    dt[i] = Scalar(0.1);
    rate[i] = -Scalar(i % 97);
  }
  const auto with = [&](const auto& exp_of) {
    const double seconds = shortest_seconds(tries, [&] {
      for (Index k = 0; k < repeats; ++k) {
        Row sum[4] = {Row::Zero(), Row::Zero(), Row::Zero(), Row::Zero()};
        for (Index i = 0; i < rows; i += 4)
          detail::unroll<4>([&](auto j) MOMENTUM_DELTA_INLINE {
            const Row dt_i = detail::aligned_row(dt + (i + j) * W);
            const Row rate_i = detail::aligned_row(rate + (i + j) * W);
            sum[j] += exp_of(dt_i, rate_i);
          });
        Row total = sum[0] + sum[1] + sum[2] + sum[3];
        benchmark::DoNotOptimize(total);
        benchmark::ClobberMemory();
      }
    });
    return double(repeats * rows * W) / seconds;
  };
  return {
      with([](const Row& a, const Row& b) MOMENTUM_DELTA_INLINE { return detail::decay_row<Scalar>(a, b); }),
      with([](const Row& a, const Row& b) MOMENTUM_DELTA_INLINE { return Row((a * b).exp()); })};
}

struct Case {
  Index D;
  int threads = 1;
  md::Algorithm algorithm = md::Algorithm::recurrent;
};

constexpr Index T = 2048, N = 16;

// One sequence of one group, everything but the initial state present; dt is about 0.01 and A from -1 to -N.
// Rows start at cache lines.
template <class Scalar, class Storage>
struct ScanProblem {
  template <class Element>
  using Vector = std::vector<Element, Eigen::aligned_allocator<Element>>;

  Index D;
  Random random{};
  Vector<Storage> u = tokens(D), delta = tokens(D), z = tokens(D), B = tokens(N), C = tokens(N);
  Vector<Storage> out = u, dout = tokens(D), du = u, ddelta = u, dz = u, dB = B, dC = C;
  Vector<Scalar> A = Vector<Scalar>(std::size_t(D * N)), dA = A;
  Vector<Scalar> skip = Vector<Scalar>(std::size_t(D), Scalar(1)), bias = skip, dskip = skip, dbias = skip;

  explicit ScanProblem(Index channels) : D(channels) {
    md::initialize_A_log(md::ArrayView<Scalar, 2>(A.data(), {D, N}));
    md::negative_exp(md::ArrayView<const Scalar, 2>(A.data(), {D, N}),
                     md::ArrayView<Scalar, 2>(A.data(), {D, N}));
    md::initialize_delta_bias(md::ArrayView<Scalar, 1>(bias.data(), {D}),
                              [&] { return random.uniform(0, 1); });
  }

  Vector<Storage> tokens(Index size) {
    Vector<Storage> x(std::size_t(T * size));
    for (Storage& element : x) element = Storage(Scalar(random.normal()));
    return x;
  }
  md::ArrayView<Storage, 3> rows(Vector<Storage>& x) const { return {x.data(), {1, T, D}}; }
  md::TokenView<Storage> states(Vector<Storage>& x) const { return {x.data(), {1, T, 1, N}}; }

  md::ScanInputs<Scalar, Storage> inputs() {
    return {.u = rows(u),
            .delta = rows(delta),
            .A = md::ArrayView<const Scalar, 2>(A.data(), {D, N}),
            .B = states(B),
            .C = states(C),
            .D = md::ArrayView<const Scalar, 1>(skip.data(), {D}),
            .z = rows(z),
            .delta_bias = md::ArrayView<const Scalar, 1>(bias.data(), {D})};
  }
  md::ScanOutputs<Scalar, Storage> outputs() { return {.out = rows(out)}; }
  md::ScanInputGradients<Scalar, Storage> gradients() {
    return {.du = rows(du),
            .ddelta = rows(ddelta),
            .dA = md::ArrayView<Scalar, 2>(dA.data(), {D, N}),
            .dB = states(dB),
            .dC = states(dC),
            .dD = md::ArrayView<Scalar, 1>(dskip.data(), {D}),
            .dz = rows(dz),
            .ddelta_bias = md::ArrayView<Scalar, 1>(dbias.data(), {D})};
  }
};

// A call with so many exponentials and multiply-adds a token and channel.
template <class Scalar, class Call>
void time_scan(benchmark::State& state, const Case& c, double exponentials, double multiply_adds,
               const Call& call) {
  const auto [seconds, references] = time(
      state, c.threads,
      [] {
        const auto [ours, eigens] = exp_rates<Scalar>(tries);
        return std::array{ours, eigens, peak_flops<Scalar>(tries)};
      },
      call);
  const double ns = seconds / double(T * c.D) * 1e9;
  const double eigen_exp_ns = exponentials / references[1] * 1e9,
               exp_ns = std::min(exponentials / references[0] * 1e9, eigen_exp_ns),
               multiply_ns = 2 * multiply_adds / references[2] * 1e9;
  state.counters["ns_per_token_channel"] = ns;
  state.counters["exp_ns"] = exp_ns;
  state.counters["eigen_exp_ns"] = eigen_exp_ns;
  state.counters["multiply_add_ns"] = multiply_ns;
  state.counters["bound_fraction"] = std::max(exp_ns, multiply_ns) / (ns * c.threads);
}

template <class Scalar, class Storage>
void forward(benchmark::State& state, const Case& c) {
  ScanProblem<Scalar, Storage> problem(c.D);
  md::ThreadPool pool(c.threads);
  md::Workspace workspace;
  const md::ScanOptions options{.algorithm = c.algorithm, .executor = &pool, .workspace = &workspace};
  // A decay for each state, softplus and silu; dt A, x B, a h + .., C h + ..
  time_scan<Scalar>(state, c, N + 2, 4 * N,
                    [&] { md::scan_forward(problem.inputs(), problem.outputs(), options); });
}

template <class Scalar, class Storage>
void training(benchmark::State& state, const Case& c) {
  ScanProblem<Scalar, Storage> problem(c.D);
  md::ScanSaved<Scalar> saved;
  md::ThreadPool pool(c.threads);
  md::Workspace workspace;
  const md::ScanOptions options{.algorithm = c.algorithm, .executor = &pool, .workspace = &workspace};
  // Backward, the decays again, softplus and silu with their derivatives from one exponential each; and fourteen
  // multiply-adds a state, of which four rebuild it (selective_scan/backward.hpp).
  time_scan<Scalar>(state, c, 2 * (N + 2), (4 + 14) * N, [&] {
    md::scan_forward(problem.inputs(), problem.outputs(), saved, options);
    md::scan_backward(problem.inputs(), saved, {.dout = problem.rows(problem.dout)}, problem.gradients(),
                      {.executor = &pool, .workspace = &workspace});
  });
}

template <class Scalar, class Storage = Scalar>
void add_type(const std::string& type) {
  const int all = md::ThreadPool().threads();
  for (const Index D : {1536, 5120}) {
    for (int threads = 1; threads <= all; threads = threads == all ? all + 1 : all) {
      const auto add = [&](const std::string& name, void (*function)(benchmark::State&, const Case&),
                           md::Algorithm algorithm) {
        const std::string sizes = "/D:" + std::to_string(D) + "/N:" + std::to_string(N) +
                                  "/T:" + std::to_string(T) + "/threads:" + std::to_string(threads);
        benchmark::RegisterBenchmark((name + type + sizes).c_str(), function, Case{D, threads, algorithm})
            ->Unit(benchmark::kMicrosecond);
      };
      add("scan/forward/recurrent/", forward<Scalar, Storage>, md::Algorithm::recurrent);
      add("scan/forward/chunk/", forward<Scalar, Storage>, md::Algorithm::chunk);
      add("scan/training/", training<Scalar, Storage>, md::Algorithm::recurrent);
    }
  }
}

}  // namespace

void add_scans() {
  add_type<float>("float");
  add_type<double>("double");
  add_type<float, Eigen::bfloat16>("bfloat16");
}

}  // namespace bench
