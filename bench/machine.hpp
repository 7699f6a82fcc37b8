// What this machine can do, measured: multiply-adds of one core, and memory traffic. Each figure is the best
// of several tries, since other work and a clock that has not risen yet only ever slow a try down.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <limits>
#include <momentum_delta/momentum_delta.hpp>
#include <utility>
#include <vector>

namespace bench {

using momentum_delta::Index;

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

template <class Try>
double shortest_seconds(int tries, const Try& run) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < tries; ++i) {
    const Stopwatch watch;
    run();
    best = std::min(best, watch.seconds());
  }
  return best;
}

// `steps` multiply-adds of each of several chains, in vectors of the widest kind that the program is compiled
// for. A chain is a sequence of dependent roundings, which no compiler may shorten or merge with another.
template <class Scalar, std::size_t... Chain>
void multiply_adds(Index steps, std::index_sequence<Chain...>) {
  namespace in = Eigen::internal;
  using Packet = typename in::packet_traits<Scalar>::type;
  Scalar factors[] = {Scalar(0.5), Scalar(0.25)};
  benchmark::DoNotOptimize(factors);  // no longer constants
  const Packet a = in::pset1<Packet>(factors[0]), b = in::pset1<Packet>(factors[1]);
  Packet x[] = {in::pset1<Packet>(Scalar(Chain))...};
  const auto step = [&](Packet& x_i) {
#ifdef EIGEN_HAS_SINGLE_INSTRUCTION_MADD
    x_i = in::pmadd(a, b, x_i);
#else
    x_i = in::padd(in::pmul(a, x_i), b);  // a product that differs from step to step, so none is hoisted
#endif
  };
  for (Index i = 0; i < steps; ++i) (step(x[Chain]), ...);
  (benchmark::DoNotOptimize(x[Chain]), ...);
}

// Floating-point operations a second of one core, two for each multiply-add and lane. A try takes about half
// a millisecond for each number of chains: enough of them to hide the latency on two units, and two of
// sixteen registers left for the factors. Which number suits the scheduler differs.
template <class Scalar>
double peak_flops(int tries) {
  constexpr Index steps = 100'000, lanes = Eigen::internal::packet_traits<Scalar>::size;
  const auto with = [&]<std::size_t chains>(std::index_sequence<chains>) {
    const double seconds =
        shortest_seconds(tries, [&] { multiply_adds<Scalar>(steps, std::make_index_sequence<chains>()); });
    return 2.0 * double(steps * Index(chains) * lanes) / seconds;
  };
  return std::max(with(std::index_sequence<12>()), with(std::index_sequence<14>()));
}

// Memory in which to measure bytes read and written a second by an executor's threads.
class WorkingSet {
 public:
  explicit WorkingSet(std::size_t bytes) : memory_(bytes / sizeof(float), 1.0f) {}

  // memcpy of one half to the other. Lines that it writes in full may still be fetched first; that is not
  // counted.
  double copy_rate(int tries, momentum_delta::Executor& executor) {
    const Index half = Index(memory_.size() / 2);
    return rate(tries, executor, half, [&](Index begin, Index end) {
      std::memcpy(memory_.data() + half + begin, memory_.data() + begin,
                  std::size_t(end - begin) * sizeof(float));
    });
  }

  // A multiplication of all of it in place: what a decode step does to its state.
  double update_rate(int tries, momentum_delta::Executor& executor) {
    return rate(tries, executor, Index(memory_.size()), [&](Index begin, Index end) {
      Eigen::Map<Eigen::ArrayXf>(memory_.data() + begin, end - begin) *= 0.9999f;
    });
  }

 private:
  // work(begin, end) reads and writes as many floats.
  template <class Work>
  double rate(int tries, momentum_delta::Executor& executor, Index count, const Work& work) {
    const Index parts = executor.threads();
    const auto task = [&](Index i, int) { work(count * i / parts, count * (i + 1) / parts); };
    const double seconds = shortest_seconds(tries, [&] {
      executor.run(parts, task);
      benchmark::ClobberMemory();
    });
    return 2.0 * sizeof(float) * double(count) / seconds;
  }

  std::vector<float> memory_;
};

// Bytes that no cache holds.
inline std::size_t large_working_set() {
  std::size_t largest = 64 << 20;
  for (const auto& cache : benchmark::CPUInfo::Get().caches)
    largest = std::max(largest, std::size_t(std::max(cache.size, 0)));
  return 4 * largest;
}

// Tries of a machine's figure just before a benchmark is timed and just after.
inline constexpr int tries = 4;

template <std::size_t N>
struct Timing {
  double seconds;                    // of one call
  std::array<double, N> references;  // what the machine could do at the time
};
template <std::size_t N>
Timing(double, std::array<double, N>) -> Timing<N>;  // clang++ 14 deduces none itself

// Times call(), by processor time if it has one thread and by the wall clock if it has more, between two
// measurements of the references; the better one counts, as the machine's clock drifts. A call before that
// makes the workspaces, whose pages the system hands out one by one.
template <class References, class Call>
auto time(benchmark::State& state, int threads, const References& references, const Call& call) {
  call();
  Timing timing{0.0, references()};
  const std::clock_t processor = std::clock();
  const Stopwatch watch;
  for (auto _ : state) {
    call();
    benchmark::ClobberMemory();
  }
  const double seconds = threads == 1 ? double(std::clock() - processor) / CLOCKS_PER_SEC : watch.seconds();
  timing.seconds = seconds / double(state.iterations());
  const auto after = references();
  for (std::size_t i = 0; i < after.size(); ++i)
    timing.references[i] = std::max(timing.references[i], after[i]);
  return timing;
}

}  // namespace bench
