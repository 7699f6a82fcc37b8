// Legal inputs raise no floating-point exception but inexact and underflow, in any call, over the sweeps of
// gates and of dt and A, whatever memory held before. Where the processor can, the first one ends the
// program.
#include <cfenv>
#include <csetjmp>
#include <csignal>
#include <cstring>

#include "support/calls.hpp"
#include "support/catch.hpp"

using namespace test;
using Eigen::bfloat16;
using Eigen::half;
using momentum_delta::Workspace;

namespace {

constexpr int exceptions = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW;

// Every call in a workspace that is left full of signalling NaNs.
class Trapped final : public Circumstances {
 public:
  template <class Scalar>
  explicit Trapped(Scalar) : word_(std::is_same_v<Scalar, float> ? 0x7fa07fa0 : 0x7ff47ff4) {}

  void make(const std::string& name, const std::function<void(Workspace*)>& call) override {
    fill();
    INFO(name);
    std::feclearexcept(FE_ALL_EXCEPT);
#if defined(__GLIBC__)
    feenableexcept(exceptions);
#endif
    call(&workspace_);
#if defined(__GLIBC__)
    fedisableexcept(exceptions);
#endif
    CHECK(std::fetestexcept(exceptions) == 0);
  }

 private:
  void fill() {
    constexpr std::size_t bytes = 1 << 20;  // enough for all calls here
    std::byte* const memory = momentum_delta::detail::Scratch(workspace_, 1, bytes).memory;
    for (std::size_t i = 0; i < bytes; i += sizeof word_) std::memcpy(memory + i, &word_, sizeof word_);
  }
  std::uint32_t word_;
  Workspace workspace_;
};

template <class Scalar, class Storage>
void sweep_gates() {
  std::uint64_t seed = 0;
  for_each_gates([&](const Gates& gates) {
    INFO("seed " << seed);
    const Problem<double> x = random_problem(++seed, {.T = 37}, gates);
    const Upstream<double> dy = random_upstream(seed, x);
    Trapped trapped{Scalar()};
    rule_calls<Scalar, Storage>(x, dy, 16, trapped);
  });
  for (const Shape& shape :
       {Shape{.T = 80, .K = 17, .V = 35}, Shape{.B = 2, .T = 1, .HK = 1, .HV = 2, .K = 1},
        Shape{.T = 67, .HK = 2, .HV = 4, .K = 3, .V = 16, .own_p = true}}) {
    const Problem<double> x = random_problem(1, shape);
    for (const Index C : {1, 3, 16, 64}) {
      INFO("T " << shape.T << " K " << shape.K << " V " << shape.V << " chunk " << C);
      Trapped trapped{Scalar()};
      rule_calls<Scalar, Storage>(x, random_upstream(2, x), C, trapped);
    }
  }
}

template <class Scalar, class Storage>
void sweep_steps() {
  for (const double dt : {0., 1e-6, 1e-4, 1e-2, 1e-1, 1., 1e1, 1e3}) {
    for (const double fastest : {-1e6, -1e30, -infinity}) {
      INFO("dt " << dt << " fastest A " << fastest);
      ScanProblem<double> x = random_scan(7, {.T = 67, .D = 19, .N = 5});
      Random random(7);
      for (double& delta : x.delta.values) delta = dt * random.uniform(0.5, 1);
      for (std::size_t i = 0; i < x.A.values.size(); ++i)
        x.A.values[i] = i % 10 == 9 ? fastest : -std::pow(10., double(i / 5 % 10) - 3);
      for (const bool softplus : {false, true}) {
        x.delta_softplus = softplus;
        x.delta_bias = softplus ? examples::zeros<double>({19}) : Array<double>{};
        Trapped trapped{Scalar()};
        scan_calls<Scalar, Storage>(x, random_upstream(7, x), 16, trapped);
      }
    }
  }
  for (const double delta : {-1e4, -200., 200., 1e4}) {
    INFO("delta " << delta);
    ScanProblem<double> x = random_scan(8, {.B = 2, .T = 3, .D = 6, .G = 2, .N = 3});
    std::fill(x.delta.values.begin(), x.delta.values.end(), delta);
    Trapped trapped{Scalar()};
    scan_calls<Scalar, Storage>(x, random_upstream(8, x), 2, trapped);
  }
}

}  // namespace

// The controls: flags are seen, and traps end the program where they can be set.
void divide_nothing_by_nothing() {
  volatile double zero = 0;
  zero = zero / zero;
}

TEST_CASE("an exception is seen") {
  std::feclearexcept(FE_ALL_EXCEPT);
  divide_nothing_by_nothing();
  CHECK(std::fetestexcept(exceptions) == FE_INVALID);
  std::feclearexcept(FE_ALL_EXCEPT);
}

#if defined(__GLIBC__)
TEST_CASE("an exception ends the program") {
  static sigjmp_buf before;
  struct sigaction handler {
  }, previous{};
  handler.sa_handler = [](int) { siglongjmp(before, 1); };
  sigaction(SIGFPE, &handler, &previous);
  volatile bool possible = true, ended = false;
  if (sigsetjmp(before, 1) == 0) {
    possible = feenableexcept(exceptions) != -1;
    divide_nothing_by_nothing();
  } else {
    ended = true;
  }
  fedisableexcept(exceptions);
  std::feclearexcept(FE_ALL_EXCEPT);
  sigaction(SIGFPE, &previous, nullptr);
  if (!possible) WARN("this processor cannot trap: exceptions are seen by their flags alone");
  CHECK(ended == possible);
}
#endif

TEST_CASE("no exception over the sweeps of gates, floats") {
  sweep_gates<float, float>();
}
TEST_CASE("no exception over the sweeps of gates, doubles") {
  sweep_gates<double, double>();
}
TEST_CASE("no exception over the sweeps of gates, bfloat16") {
  sweep_gates<float, bfloat16>();
}
TEST_CASE("no exception over the sweeps of gates, half") {
  sweep_gates<float, half>();
}
TEST_CASE("no exception over the sweeps of dt and A, floats") {
  sweep_steps<float, float>();
}
TEST_CASE("no exception over the sweeps of dt and A, doubles") {
  sweep_steps<double, double>();
}
TEST_CASE("no exception over the sweeps of dt and A, bfloat16") {
  sweep_steps<float, bfloat16>();
}
TEST_CASE("no exception over the sweeps of dt and A, half") {
  sweep_steps<float, half>();
}
TEMPLATE_TEST_CASE("no exception in what surrounds the rule, and in the layer", "", float, double) {
  for (Index size = 1; size <= 35; ++size) {
    INFO("size " << size);
    Trapped trapped{TestType()};
    parameter_calls<TestType>({.B = 2, .T = 3, .HK = 2, .HV = 4, .K = size}, trapped);
    layer_calls<TestType>(
        {.hidden_size = size, .num_heads = 2, .num_v_heads = 4, .head_dim = size, .head_v_dim = 36 - size}, 2,
        19, trapped);
  }
}
