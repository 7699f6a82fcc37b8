// Strides, grouped heads, packed sequences, decoding.
#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;
using examples::run;
using momentum_delta::GateView;
using momentum_delta::Inputs;
using momentum_delta::Outputs;
using momentum_delta::StateView;
using momentum_delta::TokenView;

namespace {

std::vector<Options> forms() {
  return {recurrent(), chunk(3), chunk(16)};
}

// A copy of `a` in memory with gaps: [B, T, H, D] laid out as [H, B, T, D + 3] with 5 more elements between
// heads.
struct Spread {
  std::vector<float> memory;
  std::array<Index, 4> shape{}, stride{};

  Spread(const Array<float>& a, float gap) {
    std::copy(a.shape.begin(), a.shape.end(), shape.begin());
    if (a.shape.size() == 3) shape[3] = 1;
    const Index row = shape[3] + 3, head = shape[0] * shape[1] * row + 5;
    stride = {shape[1] * row, row, head, 1};
    memory.assign(std::size_t(shape[2] * head), gap);
    for_each([&](std::size_t here, std::size_t dense) { memory[here] = a.values[dense]; });
  }
  template <class Visit>
  void for_each(const Visit& visit) const {
    std::size_t dense = 0;
    for (Index b = 0; b < shape[0]; ++b)
      for (Index t = 0; t < shape[1]; ++t)
        for (Index h = 0; h < shape[2]; ++h)
          for (Index d = 0; d < shape[3]; ++d)
            visit(std::size_t(b * stride[0] + t * stride[1] + h * stride[2] + d), dense++);
  }
  TokenView<float> tokens() { return {memory.data(), shape, stride}; }
  GateView<float> gates() {
    return {memory.data(), {shape[0], shape[1], shape[2]}, {stride[0], stride[1], stride[2]}};
  }
  StateView<float> states() { return {memory.data(), shape, stride}; }
};

// The problem's heads of batch b, or the tokens of packed sequence n, cut out as a problem of their own.
Problem<float> cut(const Problem<float>& x, Index b, Index begin, Index end, Index n, Index h) {
  const Index T = x.v.shape[1], HV = x.v.shape[2];
  const auto part = [&](const Array<float>& a) {
    Array<float> out{a.shape, {}};
    const Index H = a.shape[2], D = a.shape.size() == 4 ? a.shape[3] : 1;
    out.shape[0] = 1, out.shape[1] = end - begin, out.shape[2] = 1;
    for (Index t = begin; t < end; ++t) {
      const auto from = a.values.begin() + ((b * T + t) * H + h / (HV / H)) * D;
      out.values.insert(out.values.end(), from, from + D);
    }
    return out;
  };
  const auto state = [&](const Array<float>& a) {
    const Index size = a.shape[2] * a.shape[3];
    const auto from = a.values.begin() + (n * HV + h) * size;
    return Array<float>{{1, 1, a.shape[2], a.shape[3]}, {from, from + size}};
  };
  return {part(x.q),          part(x.k),          part(x.v),    part(x.p),
          part(x.log_alpha),  part(x.log_mu),     part(x.beta), part(x.eta),
          state(x.initial_S), state(x.initial_M), {},           x.scale};
}

// Every head of every sequence on its own gives the bits that the batched call gives.
void check_against_single_heads(const Problem<float>& x) {
  for (const Options& options : forms()) {
    const Results<float> y = run(x, options);
    const Index T = x.v.shape[1], HV = x.v.shape[2], V = x.v.shape[3], K = x.k.shape[3];
    for (Index n = 0; n < x.states(); ++n) {
      const bool packed = !x.cu_seqlens.empty();
      const Index b = packed ? 0 : n, begin = packed ? x.cu_seqlens[std::size_t(n)] : 0;
      const Index end = packed ? x.cu_seqlens[std::size_t(n) + 1] : T;
      for (Index h = 0; h < HV; ++h) {
        const Results<float> one = run(cut(x, b, begin, end, n, h), options);
        bool equal = true;
        for (Index t = begin; t < end; ++t)
          for (Index d = 0; d < V; ++d)
            equal &= y.o.values[std::size_t(((b * T + t) * HV + h) * V + d)] ==
                     one.o.values[std::size_t((t - begin) * V + d)];
        for (Index i = 0; i < K * V; ++i) {
          equal &=
              y.final_S.values[std::size_t((n * HV + h) * K * V + i)] == one.final_S.values[std::size_t(i)];
          equal &=
              y.final_M.values[std::size_t((n * HV + h) * K * V + i)] == one.final_M.values[std::size_t(i)];
        }
        CHECK(equal);
      }
    }
  }
}

}  // namespace

TEST_CASE("batches and heads are independent") {
  check_against_single_heads(random_problem(1, {.B = 2, .T = 11, .HK = 3, .HV = 3}).as<float>());
}

TEST_CASE("grouped heads read query and key head h / (HV / HK)") {
  check_against_single_heads(random_problem(2, {.B = 2, .T = 11, .HK = 2, .HV = 6}).as<float>());
  check_against_single_heads(
      random_problem(3, {.B = 2, .T = 11, .HK = 2, .HV = 6, .own_p = true}).as<float>());
}

TEST_CASE("packed sequences are sequences of their own") {
  for (const std::vector<Index>& offsets :
       {std::vector<Index>{0, 23}, {0, 0, 23}, {0, 1, 2, 3, 20, 20, 20, 23, 23}, {0, 2, 4, 8, 16, 23}}) {
    Problem<double> x = random_problem(4, {.T = 23, .HK = 1, .HV = 2});
    x.cu_seqlens = offsets;
    x.initial_S = x.initial_M = examples::zeros<double>(x.state_shape());
    Random random(5);
    for (double& value : x.initial_S.values) value = random.normal();
    for (double& value : x.initial_M.values) value = random.normal();
    check_against_single_heads(x.as<float>());
  }
}

TEST_CASE("no sequence, no token") {
  Problem<double> x = random_problem(4, {.T = 0});
  x.initial_S = x.initial_M = {};
  x.cu_seqlens = {0};
  for (const Options& options : forms()) CHECK(run(x, options).final_S.values.empty());
}

TEST_CASE("strided memory gives the same bits, and the gaps stay as they were") {
  const Problem<float> x = random_problem(6, {.B = 2, .T = 11, .HK = 1, .HV = 3}).as<float>();
  const float nan = std::nanf("");
  Spread q(x.q, nan), k(x.k, nan), v(x.v, nan), p(x.p, nan), log_alpha(x.log_alpha, nan),
      log_mu(x.log_mu, nan), beta(x.beta, nan), eta(x.eta, nan), S0(x.initial_S, nan), M0(x.initial_M, nan);
  const Inputs<float> strided{.q = q.tokens(),
                              .k = k.tokens(),
                              .v = v.tokens(),
                              .p = p.tokens(),
                              .log_alpha = log_alpha.gates(),
                              .log_mu = log_mu.gates(),
                              .beta = beta.gates(),
                              .eta = eta.gates(),
                              .initial_S = S0.states(),
                              .initial_M = M0.states()};
  for (const Options& options : forms()) {
    Results<float> y{x.v, x.initial_S, x.initial_M};
    for (auto* a : {&y.o, &y.final_S, &y.final_M}) std::fill(a->values.begin(), a->values.end(), nan);
    Spread o(y.o, 42), S(y.final_S, 42), M(y.final_M, 42);
    momentum_delta::forward(strided, {.o = o.tokens(), .final_S = S.states(), .final_M = M.states()},
                            options);
    const auto collect = [](Spread& from, Array<float>& to) {
      from.for_each([&](std::size_t here, std::size_t dense) {
        to.values[dense] = from.memory[here];
        from.memory[here] = 42;
      });
      CHECK(std::count(from.memory.begin(), from.memory.end(), 42.f) == Index(from.memory.size()));
    };
    collect(o, y.o);
    collect(S, y.final_S);
    collect(M, y.final_M);
    CHECK(equal_values(y, run(x, options)));
  }
}

TEST_CASE("an input may be broadcast by strides of 0") {
  const Problem<float> x = random_problem(7, {.B = 2, .T = 11, .HK = 2, .HV = 2}).as<float>();
  Problem<float> dense = x;
  for (std::size_t i = 0; i < dense.q.values.size(); ++i) dense.q.values[i] = x.q.values[i % 5];
  Inputs<float> inputs = x.inputs();
  inputs.q.stride = {0, 0, 0, 1};
  for (const Options& options : forms()) {
    Results<float> y = run(x, options);
    momentum_delta::forward(inputs, y.outputs(), options);
    CHECK(equal_values(y, run(dense, options)));
  }
}

TEST_CASE("the state may be updated in place, and need not be asked for") {
  const Problem<float> x = random_problem(8, {.B = 2, .T = 11, .HK = 2, .HV = 2}).as<float>();
  for (const Options& options : forms()) {
    const Results<float> expected = run(x, options);
    Problem<float> z = x;
    Results<float> y{expected.o, {}, {}};
    momentum_delta::forward(z.inputs(),
                            {.o = y.outputs().o,
                             .final_S = z.initial_S.view<StateView<float>>(),
                             .final_M = z.initial_M.view<StateView<float>>()},
                            options);
    CHECK(equal_values(expected, {y.o, z.initial_S, z.initial_M}));
    y.o = examples::zeros<float>(y.o.shape);
    momentum_delta::forward(x.inputs(), y.outputs(), options);
    CHECK(equal_values(y.o, expected.o));
  }
}

TEST_CASE("Eigen objects are single heads: matrices, maps, blocks, vectors with strides") {
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Problem<float> x = random_problem(9, {.T = 20}).as<float>();
  const auto rows = [](const Array<float>& a) {
    return Rows(Eigen::Map<const Rows>(
        a.values.data(), a.shape[a.shape.size() == 4 && a.shape[1] == 1 ? 2 : 1], a.shape.back()));
  };
  const Rows q = rows(x.q), v = rows(x.v);
  Rows wide(20, 12);  // k and p side by side, and every second row of a table of gates
  wide << rows(x.k), rows(x.p), Eigen::Vector<float, 20>::Zero(), Eigen::Vector<float, 20>::Zero();
  Rows gates(20, 4);
  for (Index t = 0; t < 20; ++t)
    gates.row(t) << x.log_alpha.values[std::size_t(t)], x.log_mu.values[std::size_t(t)],
        x.beta.values[std::size_t(t)], x.eta.values[std::size_t(t)];
  Rows S = rows(x.initial_S), M = rows(x.initial_M), o(20, 7);
  const Inputs<float> inputs{.q = q,
                             .k = wide.leftCols(5),
                             .v = v,
                             .p = wide.middleCols(5, 5),
                             .log_alpha = gates.col(0),
                             .log_mu = gates.col(1),
                             .beta = gates.col(2),
                             .eta = gates.col(3),
                             .initial_S = S,
                             .initial_M = M};
  momentum_delta::forward(inputs, {.o = o, .final_S = S, .final_M = M}, chunk(16));
  const Results<float> y = run(x, chunk(16));
  CHECK(o == rows(y.o));
  CHECK(S == rows(y.final_S));
  CHECK(M == rows(y.final_M));
}

TEMPLATE_TEST_CASE("step after step is the recurrence", "", float, double) {
  const Problem<TestType> x = random_problem(10, {.B = 2, .T = 9, .HK = 1, .HV = 2}).template as<TestType>();
  const Results<TestType> expected = run(x, recurrent());
  Results<TestType> y{examples::zeros<TestType>(x.v.shape), x.initial_S, x.initial_M};
  const Outputs<TestType> whole = y.outputs();
  for (Index t = 0; t < 9; ++t) {
    momentum_delta::step(step_inputs(x.inputs(), t), whole.final_S, whole.final_M, token_of(whole.o, t));
  }
  const auto close = [](const Array<TestType>& a, const Array<TestType>& b) {
    return rel_rms(a, examples::cast<long double>(b)) <= 20 * std::numeric_limits<TestType>::epsilon();
  };
  CHECK(close(y.o, expected.o));
  CHECK(close(y.final_S, expected.final_S));
  CHECK(close(y.final_M, expected.final_M));
}
