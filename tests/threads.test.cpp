// Executors and workspaces change no bit of a result, and calls with a workspace allocate nothing.
#include <cstring>
#include <new>
#include <thread>

#include "support/catch.hpp"
#include "support/heap.hpp"
#include "support/problem.hpp"

using namespace test;
using momentum_delta::Executor;
using momentum_delta::Inputs;
using momentum_delta::Saved;
using momentum_delta::SerialExecutor;
using momentum_delta::TaskRef;
using momentum_delta::ThreadPool;
using momentum_delta::Workspace;
namespace detail = momentum_delta::detail;

namespace {

std::vector<Options> forms() {
  return {recurrent(), chunk(5), chunk(16)};
}

Options with(Options options, Executor* executor, Workspace* workspace = nullptr) {
  options.executor = executor;
  options.workspace = workspace;
  return options;
}

// Fills what a workspace holds with NaN.
void poison(Workspace& workspace) {
  const detail::Scratch all(workspace, 1, workspace.bytes());
  if (all.memory != nullptr) std::memset(all.memory, 0xff, workspace.bytes());
}

// An executor as contrary as it may be: the last task first, each by any worker, and with nothing left in the
// workspace of what other tasks had there.
class Contrary final : public Executor {
 public:
  Contrary(int threads, Workspace& workspace) : threads_(threads), workspace_(workspace) {}

  int threads() const override { return threads_; }
  void run(Index count, TaskRef task) override {
    most_tasks = std::max(most_tasks, count);
    for (Index i = count; i-- > 0;) {
      poison(workspace_);
      task(i, int(random_.bits() % std::uint64_t(threads_)));
    }
  }

  Index most_tasks = 0;

 private:
  int threads_;
  Workspace& workspace_;
  Random random_{1};
};

template <class Scalar>
struct Case {
  Problem<Scalar> x;
  Upstream<Scalar> dy;

  Case(const Shape& shape, const std::vector<Index>& cu_seqlens = {}) {
    Problem<double> exact = random_problem(1, shape);
    exact.cu_seqlens = cu_seqlens;
    Random random(2);
    for (auto* a : {&exact.initial_S, &exact.initial_M}) {
      *a = examples::zeros<double>(exact.state_shape());
      for (double& value : a->values) value = float(random.normal());
    }
    x = exact.as<Scalar>();
    dy = random_upstream(3, exact).as<Scalar>();
  }
};

// One head of many columns, many heads, groups, packed sequences, and V on both sides of a panel and of a
// tile of panels.
template <class Scalar>
std::vector<Case<Scalar>> cases() {
  return {{{.T = 40, .K = 33, .V = 100}},
          {{.T = 3, .K = 7, .V = 300}},
          {{.T = 11, .HK = 1, .HV = 2, .K = 17, .V = 100, .own_p = true}},
          {{.B = 2, .T = 21, .HK = 3, .HV = 6, .V = 17}},
          {{.T = 23, .HK = 2, .HV = 4, .V = 16, .own_p = true}, {0, 0, 1, 2, 20, 20, 23}},
          {{.T = 23, .HK = 2, .HV = 6, .K = 3, .V = 1}, {0, 11, 23}},
          {{.T = 9, .K = 16, .V = 1}}};
}

// The first token of every batch, as one step.
template <class Scalar>
Results<Scalar> run_step(const Problem<Scalar>& x, const Options& options) {
  const Index B = x.v.shape[0], HV = x.v.shape[2], V = x.v.shape[3];
  const auto state = [&](const Array<Scalar>& a) {
    Array<Scalar> first{{B, HV, a.shape[2], V}, a.values};
    first.values.resize(std::size_t(B * HV * a.shape[2] * V));
    return first;
  };
  Results<Scalar> y{examples::unwritten<Scalar>({B, 1, HV, V}), state(x.initial_S), state(x.initial_M)};
  momentum_delta::step(step_inputs(x.inputs(), 0), y.outputs().final_S, y.outputs().final_M, y.outputs().o,
                       options);
  return y;
}

// What every call gives, one tensor after the other.
template <class Scalar>
std::vector<Scalar> everything(const Case<Scalar>& c, Executor* executor, Workspace* workspace = nullptr) {
  std::vector<Scalar> all;
  const auto add = [&](const Array<Scalar>& a) { all.insert(all.end(), a.values.begin(), a.values.end()); };
  const auto add_results = [&](const Results<Scalar>& y) {
    add(y.o);
    add(y.final_S);
    add(y.final_M);
  };
  for (const Options& form : forms()) {
    const Options options = with(form, executor, workspace);
    Results<Scalar> y = examples::run(c.x, options);
    add_results(y);
    for (auto* a : {&y.o, &y.final_S, &y.final_M}) *a = examples::unwritten<Scalar>(a->shape);
    Saved<Scalar> saved;
    momentum_delta::forward(c.x.inputs(), y.outputs(), saved, options);
    add_results(y);
    for (const bool keep_u : {false, true}) {
      const Gradients<Scalar> dx = examples::run_backward(c.x, c.dy, options, 2, keep_u);
      Gradients<Scalar>::for_each([&](const char*, auto get, auto) { add(get(dx)); });
    }
  }
  add_results(run_step(c.x, with({}, executor, workspace)));
  return all;
}

template <class Scalar>
bool same_bits(const std::vector<Scalar>& a, const std::vector<Scalar>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(Scalar)) == 0;
}

}  // namespace

TEMPLATE_TEST_CASE("the same bits, whoever runs the tasks", "", float, double) {
  SerialExecutor serial;
  ThreadPool one(1), two(2), three(3), eight(8);
  Workspace shared;
  Contrary contrary(3, shared);
  for (const Case<TestType>& c : cases<TestType>()) {
    INFO("HV " << c.x.v.shape[2] << " V " << c.x.v.shape[3]);
    const std::vector<TestType> expected = everything(c, nullptr);
    CHECK(std::none_of(expected.begin(), expected.end(), [](TestType value) { return std::isnan(value); }));
    for (Executor* executor : std::initializer_list<Executor*>{&serial, &one, &two, &three, &eight}) {
      INFO(executor->threads() << " threads");
      CHECK(same_bits(everything(c, executor, &shared), expected));
    }
    CHECK(same_bits(everything(c, &contrary, &shared), expected));
  }
}

TEST_CASE("the columns of few heads are cut into tasks, as many as there are panels") {
  Workspace workspace;
  Contrary contrary(8, workspace);
  const Case<float> c({.T = 3, .HK = 1, .HV = 2, .V = 100});
  for (const Options& form : forms()) {
    contrary.most_tasks = 0;
    examples::run(c.x, with(form, &contrary, &workspace));
    CHECK(contrary.most_tasks == 2 * 7);
  }
}

TEMPLATE_TEST_CASE("threads share a pool", "", float, double) {
  const std::vector<Case<TestType>> all = cases<TestType>();
  std::vector<std::vector<TestType>> expected;
  for (const Case<TestType>& c : all) expected.push_back(everything(c, nullptr));
  ThreadPool pool(3);
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> callers;
    for (std::size_t caller = 0; caller < 4; ++caller)
      callers.emplace_back([&, caller] {
        for (std::size_t repeat = 0; repeat < 4; ++repeat) {
          const std::size_t i = (caller + repeat) % all.size();
          wrong += !same_bits(everything(all[i], &pool), expected[i]);
        }
      });
  }
  CHECK(wrong == 0);
}

TEST_CASE("calls from within tasks of the same pool") {
  const Case<float> c = cases<float>()[0];
  const std::vector<float> expected = everything(c, nullptr);
  ThreadPool pool(3);
  std::atomic<int> wrong = 0;
  pool.run(6, [&](Index, int) { wrong += !same_bits(everything(c, &pool), expected); });
  CHECK(wrong == 0);
}

TEST_CASE("one workspace for calls of every shape, type and form, whatever is left in it") {
  const auto floats = cases<float>();
  const auto doubles = cases<double>();
  std::vector<std::vector<float>> expected_floats;
  std::vector<std::vector<double>> expected_doubles;
  for (const Case<float>& c : floats) expected_floats.push_back(everything(c, nullptr));
  for (const Case<double>& c : doubles) expected_doubles.push_back(everything(c, nullptr));
  ThreadPool pool(3);
  Workspace workspace;
  std::size_t bytes = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (std::size_t i = 0; i < floats.size(); ++i) {
      for (Executor* executor : {static_cast<Executor*>(nullptr), static_cast<Executor*>(&pool)}) {
        CHECK(same_bits(everything(floats[i], executor, &workspace), expected_floats[i]));
        CHECK(same_bits(everything(doubles[i], executor, &workspace), expected_doubles[i]));
        poison(workspace);
      }
    }
    if (repeat == 0) bytes = workspace.bytes();
  }
  CHECK(bytes > 0);
  CHECK(workspace.bytes() == bytes);
}

TEST_CASE("the shares of a workspace are aligned and lie apart") {
  Workspace workspace;
  detail::Arena need;
  CHECK(need.take<char>(1) == nullptr);
  CHECK(need.take<double>(9) == nullptr);
  const detail::Scratch scratch(workspace, 3, need.used());
  const auto* end = reinterpret_cast<const std::byte*>(scratch.memory);
  for (int worker = 0; worker < 3; ++worker) {
    detail::Arena arena = scratch.arena(worker);
    const char* const a = arena.take<char>(1);
    const double* const b = arena.take<double>(9);
    CHECK(reinterpret_cast<std::uintptr_t>(a) % 64 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(b) % 64 == 0);
    CHECK(reinterpret_cast<const std::byte*>(a) >= end);
    CHECK(reinterpret_cast<const std::byte*>(b) > reinterpret_cast<const std::byte*>(a));
    end = reinterpret_cast<const std::byte*>(b + 9);
  }
  CHECK(end <= scratch.memory + workspace.bytes());
}

// A tile has more rows than a row of long doubles has lanes, so that some rows of the last tile belong to no
// token and to no block of the mask.
TEST_CASE("what pads a tile of long doubles reaches no result") {
  for (Index T = 1; T <= 17; ++T) {
    const Case<long double> c({.T = T, .K = 5, .V = 3});
    const Inputs<long double> x = c.x.inputs();
    Workspace workspace;
    Saved<long double> saved(1, T % 2 == 0);
    std::vector<Gradients<long double>> gradients;
    std::vector<Results<long double>> results;
    for (Options options : {recurrent(), chunk(7), chunk(17)}) {
      options.workspace = &workspace;
      for (int pass = 0; pass < 2; ++pass) {  // the first one only makes the memory, which is then spoiled
        results.push_back(examples::run(c.x, recurrent()));
        gradients.push_back({c.x.q, c.x.k, c.x.v, c.x.p, c.x.log_alpha, c.x.log_mu, c.x.beta, c.x.eta,
                             c.x.initial_S, c.x.initial_M});
        momentum_delta::forward(x, results.back().outputs(), saved, options);
        poison(workspace);
        momentum_delta::backward(x, saved, c.dy.views(), gradients.back().views(),
                                 {.algorithm = options.algorithm, .workspace = &workspace});
        poison(workspace);
      }
    }
    INFO("T " << T);
    for (std::size_t i = 2; i < results.size(); ++i) {
      CHECK(rel_rms(results[i].o, results[0].o) < 1e-16);
      Gradients<long double>::for_each([&](const char* name, auto get, auto) {
        INFO(name);
        if (!get(gradients[0]).absent()) CHECK(rel_rms(get(gradients[i]), get(gradients[0])) < 1e-16);
      });
    }
  }
}

TEMPLATE_TEST_CASE("once a workspace has grown, calls of every shape allocate nothing", "", float, double) {
  if (!heap_is_counted) return;
  // The control: all that can allocate is counted.
  CHECK(allocations_of([] { ::operator delete(::operator new(1)); }) == 1);
  constexpr std::align_val_t line{64};
  CHECK(allocations_of([] { ::operator delete(::operator new(1, line), line); }) == 1);
  CHECK(allocations_of([] { Eigen::internal::aligned_free(Eigen::internal::aligned_malloc(1)); }) == 1);

  SerialExecutor serial;
  ThreadPool pool(3);
  Workspace workspace;
  const std::vector<Case<TestType>> all = cases<TestType>();
  for (const Case<TestType>& c : all) everything(c, &pool, &workspace);
  for (const Case<TestType>& c : all) {
    INFO("HV " << c.x.v.shape[2] << " V " << c.x.v.shape[3]);
    for (Executor* executor : std::initializer_list<Executor*>{nullptr, &serial, &pool}) {
      INFO((executor ? executor->threads() : 0) << " threads");
      for (const Options& form : forms()) {
        INFO("algorithm " << int(form.algorithm) << " chunk " << form.chunk_size.value_or(0));
        const Options options = with(form, executor, &workspace);
        const Inputs<TestType> x = c.x.inputs();
        Results<TestType> y = examples::run(c.x, recurrent());
        const momentum_delta::Outputs<TestType> outputs = y.outputs();
        CHECK(allocations_of([&] { momentum_delta::forward(x, outputs, options); }) == 0);

        for (const bool keep_u : {false, true}) {
          Saved<TestType> saved(2, keep_u);
          momentum_delta::forward(x, outputs, saved, form);
          CHECK(allocations_of([&] { momentum_delta::forward(x, outputs, saved, options); }) == 0);
          Gradients<TestType> dx = examples::run_backward(c.x, c.dy, form);
          const momentum_delta::InputGradients<TestType> gradients = dx.views();
          const momentum_delta::OutputGradients<TestType> upstream = c.dy.views();
          CHECK(allocations_of([&] { momentum_delta::backward(x, saved, upstream, gradients, options); }) ==
                0);
        }
      }
      // One token, in the state's own memory.
      Case<TestType> one({.B = 2, .T = 1, .HK = 2, .HV = 4, .K = c.x.k.shape[3], .V = c.x.v.shape[3]});
      Results<TestType> y{one.x.v, one.x.initial_S, one.x.initial_M};
      one.x.initial_S = one.x.initial_M = {};
      const Inputs<TestType> x = one.x.inputs();
      const momentum_delta::Outputs<TestType> outputs = y.outputs();
      CHECK(allocations_of([&] {
              momentum_delta::step(x, outputs.final_S, outputs.final_M, outputs.o,
                                   {.executor = executor, .workspace = &workspace});
            }) == 0);
    }
  }
}
