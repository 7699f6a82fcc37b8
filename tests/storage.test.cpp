// Storage of bfloat16 and half: the float kernels' results, rounded once.
#include <array>
#include <bit>
#include <cstring>

#include "support/catch.hpp"
#include "support/heap.hpp"
#include "support/problem.hpp"

using namespace test;
using Eigen::bfloat16;
using Eigen::half;
using examples::cast;
using examples::unwritten;
using momentum_delta::InputGradients;
using momentum_delta::Inputs;
using momentum_delta::OutputGradients;
using momentum_delta::Outputs;
using momentum_delta::Saved;
using momentum_delta::ThreadPool;
using momentum_delta::TokenView;
using momentum_delta::Workspace;
namespace detail = momentum_delta::detail;

namespace {

template <class Storage>
Storage from_bits(std::uint32_t bits) {
  return Eigen::numext::bit_cast<Storage>(std::uint16_t(bits));
}
template <class Storage>
std::uint32_t bits_of(Storage value) {
  return Eigen::numext::bit_cast<std::uint16_t>(value);
}

template <class Scalar>
bool same_bits(const Array<Scalar>& a, const Array<Scalar>& b) {
  return a.shape == b.shape && a.values.size() == b.values.size() &&
         (a.absent() || std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(Scalar)) == 0);
}

template <class Storage>
TokenView<const Storage> tokens(const Array<Storage>& a) {
  return a.template view<TokenView<const Storage>>();
}
template <class Storage>
TokenView<Storage> tokens(Array<Storage>& a) {
  return a.template view<TokenView<Storage>>();
}

Options threaded(Options options, ThreadPool& pool) {
  options.executor = &pool;
  return options;
}

enum class P { of_keys, of_values, absent };

// A problem whose q, k, v, p and do_ are numbers of Storage, as floats and in Storage.
template <class Storage>
struct Stored {
  Problem<float> x;
  Upstream<float> dy;
  Array<Storage> q, k, v, p, do_;

  Stored(Shape shape, P kind) {
    shape.own_p = kind == P::of_values;
    x = random_problem(1, shape).as<float>();
    dy = random_upstream(2, x.as<double>()).template as<float>();
    if (kind == P::absent) x.p = {};
    const auto store = [](Array<float>& from, Array<Storage>& to) {
      to = cast<Storage>(from);
      from = cast<float>(to);
    };
    store(x.q, q);
    store(x.k, k);
    store(x.v, v);
    store(x.p, p);
    store(dy.do_, do_);
  }

  Inputs<float, Storage> inputs() const {
    const Inputs<float> f = x.inputs();
    return {.q = tokens(q),
            .k = tokens(k),
            .v = tokens(v),
            .p = tokens(p),
            .log_alpha = f.log_alpha,
            .log_mu = f.log_mu,
            .beta = f.beta,
            .eta = f.eta,
            .initial_S = f.initial_S,
            .initial_M = f.initial_M};
  }
  OutputGradients<float, Storage> upstream() const {
    return {.do_ = tokens(do_), .dfinal_S = dy.views().dfinal_S, .dfinal_M = dy.views().dfinal_M};
  }
};

// What forward() writes; o of the Storage, the states float.
template <class Storage>
struct StoredResults {
  Array<Storage> o;
  Results<float> states;

  explicit StoredResults(const Problem<float>& x)
      : o(unwritten<Storage>(x.v.shape)),
        states{{}, unwritten<float>(x.state_shape()), unwritten<float>(x.state_shape())} {}
  Outputs<float, Storage> outputs() {
    return {.o = tokens(o), .final_S = states.outputs().final_S, .final_M = states.outputs().final_M};
  }
  bool rounds(const Results<float>& y) const {
    return same_bits(o, cast<Storage>(y.o)) && same_bits(states.final_S, y.final_S) &&
           same_bits(states.final_M, y.final_M);
  }
};

// What backward() writes: dq, dk, dv, dp of the Storage, the others float. Made from the floats to start
// with.
template <class Storage>
struct StoredGradients {
  Array<Storage> dq, dk, dv, dp;
  Gradients<float> others;

  explicit StoredGradients(const Gradients<float>& g)
      : dq(cast<Storage>(g.dq)),
        dk(cast<Storage>(g.dk)),
        dv(cast<Storage>(g.dv)),
        dp(cast<Storage>(g.dp)),
        others(g) {}
  InputGradients<float, Storage> views(bool accumulate) {
    const InputGradients<float> f = others.views();
    return {.dq = tokens(dq),
            .dk = tokens(dk),
            .dv = tokens(dv),
            .dp = tokens(dp),
            .dlog_alpha = f.dlog_alpha,
            .dlog_mu = f.dlog_mu,
            .dbeta = f.dbeta,
            .deta = f.deta,
            .dinitial_S = f.dinitial_S,
            .dinitial_M = f.dinitial_M,
            .accumulate = accumulate};
  }
};

// Gradients to start with: numbers of Storage, where there is an input.
template <class Storage>
Gradients<float> some_gradients(const Problem<float>& x) {
  Random random(3);
  Gradients<float> g;
  Gradients<float>::for_each([&](const char*, auto get, auto get_input) {
    get(g) = get_input(x);
    for (float& value : get(g).values) value = float(Storage(float(random.normal())));
  });
  return g;
}

// backward() of the same forward pass, by both, that of the Storage in a pool's threads.
template <class Storage>
void check_backward(const Stored<Storage>& s, const Saved<float>& saved, const Options& options,
                    ThreadPool& pool) {
  Results<float> y = examples::run(s.x, options);
  Saved<float> float_saved(2);
  momentum_delta::forward(s.x.inputs(), y.outputs(), float_saved, options);
  const Gradients<float> start = some_gradients<Storage>(s.x);
  Gradients<float> assigned = start;
  momentum_delta::backward(s.x.inputs(), float_saved, s.dy.views(), assigned.views(), options);

  for (const bool accumulate : {false, true}) {
    INFO("accumulate " << accumulate);
    StoredGradients<Storage> dx(start);
    momentum_delta::backward(s.inputs(), saved, s.upstream(), dx.views(accumulate), threaded(options, pool));

    Gradients<float> expected = start;
    InputGradients<float> views = expected.views();
    views.accumulate = accumulate;
    momentum_delta::backward(s.x.inputs(), float_saved, s.dy.views(), views, options);
    const auto rounds = [&](const Array<Storage>& d, Array<float> Gradients<float>::*member) {
      Array<float> sum = assigned.*member;
      for (std::size_t i = 0; accumulate && i < sum.values.size(); ++i)
        sum.values[i] += (start.*member).values[i];
      return same_bits(d, cast<Storage>(sum));
    };
    CHECK(rounds(dx.dq, &Gradients<float>::dq));
    CHECK(rounds(dx.dk, &Gradients<float>::dk));
    CHECK(rounds(dx.dv, &Gradients<float>::dv));
    CHECK(rounds(dx.dp, &Gradients<float>::dp));
    Gradients<float>::for_each([&](const std::string& name, auto get, auto) {
      if (name == "dq" || name == "dk" || name == "dv" || name == "dp") return;
      INFO(name);
      CHECK(same_bits(get(dx.others), get(expected)));
    });
  }
}

template <class Storage>
void check_step(const Stored<Storage>& s) {
  Inputs<float> x = step_inputs(s.x.inputs(), 0);
  Inputs<float, Storage> stored = step_inputs(s.inputs(), 0);
  std::vector<Index> shape = s.x.v.shape;
  shape[1] = 1;
  Results<float> y{unwritten<float>(shape), s.x.initial_S, s.x.initial_M};
  StoredResults<Storage> z(s.x);
  z.o = unwritten<Storage>(shape);
  z.states = {{}, s.x.initial_S, s.x.initial_M};
  momentum_delta::step(x, y.outputs().final_S, y.outputs().final_M, y.outputs().o);
  momentum_delta::step(stored, z.outputs().final_S, z.outputs().final_M, z.outputs().o);
  CHECK(z.rounds(y));
}

template <class Storage>
void check(const Shape& shape, P kind, const std::vector<Options>& forms, ThreadPool& pool) {
  const Stored<Storage> s(shape, kind);
  INFO("K " << shape.K << " V " << shape.V << " HK " << shape.HK << " HV " << shape.HV << " p " << int(kind));
  for (const Options& options : forms) {
    INFO("algorithm " << int(options.algorithm) << " chunk " << options.chunk_size.value_or(0));
    const Results<float> y = examples::run(s.x, options);
    StoredResults<Storage> z(s.x), z_saved(s.x);
    momentum_delta::forward(s.inputs(), z.outputs(), options);
    CHECK(z.rounds(y));
    Saved<float> saved(2);
    momentum_delta::forward(s.inputs(), z_saved.outputs(), saved, threaded(options, pool));
    CHECK(z_saved.rounds(y));
    check_backward(s, saved, options, pool);
  }
  check_step(s);
}

}  // namespace

TEMPLATE_TEST_CASE("every number of storage has its value, in rows of every width", "", bfloat16, half) {
  constexpr int W = detail::panel_width<float>;
  const auto same = [](float a, TestType b) {
    const float exact = static_cast<float>(b);
    return std::isnan(exact) ? std::isnan(a)
                             : std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(exact);
  };
  std::vector<TestType> stored;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) stored.push_back(from_bits<TestType>(bits));
  std::vector<float> floats(stored.size());
  detail::convert(stored.data(), floats.data(), Index(stored.size()));
  int wrong = 0, not_numbers = 0;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    wrong += !same(floats[i], stored[i]);
    not_numbers += std::isnan(floats[i]);
  }
  CHECK(wrong == 0);
  CHECK(not_numbers == (std::is_same_v<TestType, half> ? 2 * 0x3ff : 2 * 0x7f));
  for (int width = 1; width <= W; ++width) {
    wrong = 0;
    for (std::size_t i = 0; i + std::size_t(width) <= stored.size(); i += std::size_t(width)) {
      const detail::Row<float> row = detail::load_row<float>(&stored[i], width);
      for (int j = 0; j < W; ++j)
        wrong += !(j < width ? same(row[j], stored[i + std::size_t(j)]) : row[j] == 0);
    }
    INFO("width " << width);
    CHECK(wrong == 0);
  }
}

TEMPLATE_TEST_CASE("floats are rounded to nearest even, in rows of every width", "", bfloat16, half) {
  constexpr int W = detail::panel_width<float>;
  constexpr std::uint32_t infinite = std::is_same_v<TestType, half> ? 0x7c00 : 0x7f80;
  constexpr std::uint32_t nan = 0xffff;  // stands for any
  std::vector<float> floats;
  std::vector<std::uint32_t> expected;
  const auto rounds = [&](float from, std::uint32_t to) {
    floats.insert(floats.end(), {from, -from});
    expected.insert(expected.end(), {to, to == nan ? nan : to | 0x8000});
  };
  // Every finite number, subnormal ones and 0 included, and what lies between it and the next; the one after
  // the largest, from which on all is infinite, is what it would be with a larger exponent.
  const auto value = [](std::uint32_t bits) { return double(static_cast<float>(from_bits<TestType>(bits))); };
  for (std::uint32_t bits = 0; bits < infinite; ++bits) {
    const double here = value(bits);
    const double next = bits + 1 < infinite ? value(bits + 1) : 2 * here - value(bits - 1);
    const float middle = float((here + next) / 2);
    rounds(float(here), bits);
    rounds(std::nextafter(middle, 0.f), bits);
    rounds(middle, bits + bits % 2);
    rounds(std::nextafter(middle, INFINITY), bits + 1);
  }
  using Limits = std::numeric_limits<float>;
  rounds(Limits::max(), infinite);
  rounds(Limits::infinity(), infinite);
  rounds(Limits::denorm_min(), 0);
  for (const std::uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0x7f80ffffu, 0x7fff8000u})
    rounds(std::bit_cast<float>(bits), nan);

  const auto same = [](TestType a, std::uint32_t bits) {
    return bits == nan ? bool(Eigen::numext::isnan(a)) : bits_of(a) == bits;
  };
  std::vector<TestType> stored(floats.size());
  detail::convert(floats.data(), stored.data(), Index(floats.size()));
  int wrong = 0;
  for (std::size_t i = 0; i < stored.size(); ++i) wrong += !same(stored[i], expected[i]);
  CHECK(wrong == 0);
  const TestType untouched = from_bits<TestType>(42);
  for (int width = 1; width <= W; ++width) {
    wrong = 0;
    for (std::size_t i = 0; i + W <= floats.size(); i += std::size_t(width)) {
      std::array<TestType, W> to;
      to.fill(untouched);
      detail::store_row(detail::Row<float>(Eigen::Map<const detail::Row<float>>(&floats[i])), to.data(),
                        width);
      for (std::size_t j = 0; j < std::size_t(W); ++j)
        wrong += !same(to[j], j < std::size_t(width) ? expected[i + j] : 42);
    }
    INFO("width " << width);
    CHECK(wrong == 0);
  }
}

TEMPLATE_TEST_CASE("results are the float kernel's, rounded once", "", bfloat16, half) {
  const Index sizes[] = {1, 3, 7, 16, 17, 33, 64, 65};
  const std::vector<Options> forms = {recurrent(), {.chunk_size = 7}, chunk(5), chunk(16)};
  std::vector<Options> more_forms = forms;
  for (const Index size : {1, 64}) more_forms.push_back(chunk(size));
  ThreadPool pool(3);
  int number = 0;
  for (const Index K : sizes)
    for (const Index V : sizes)
      check<TestType>({.T = 18, .HK = 1, .HV = 2, .K = K, .V = V}, P(number++ % 3), forms, pool);
  for (const P kind : {P::of_keys, P::of_values, P::absent})
    check<TestType>({.B = 2, .T = 37, .HK = 2, .HV = 6, .K = 17, .V = 33}, kind, more_forms, pool);
  check<TestType>({.T = 7, .K = 17, .V = 300}, P::of_keys, {recurrent(), chunk(3)}, pool);
  check<TestType>({.T = 300, .K = 17, .V = 19}, P::of_keys, {recurrent(), chunk(64)}, pool);
}

TEMPLATE_TEST_CASE("Eigen objects of the Storage are single heads", "", bfloat16, half) {
  using Rows = Eigen::Matrix<TestType, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Stored<TestType> s({.T = 20, .K = 5, .V = 19}, P::of_keys);
  const auto rows = [](const Array<TestType>& a) {
    return Eigen::Map<const Rows>(a.values.data(), a.shape[1], a.shape[3]);
  };
  Rows k_and_p(20, 12), v_and_q = Rows::Zero(20, 24);
  k_and_p << rows(s.k), Rows::Zero(20, 2), rows(s.p);
  v_and_q << rows(s.v), rows(s.q);
  const Rows v = v_and_q.leftCols(19);
  const Eigen::Ref<const Rows> q = v_and_q.rightCols(5);
  Inputs<float, TestType> x = s.inputs();
  x.q = q;
  x.k = k_and_p.leftCols(5);
  x.v = v;
  x.p = k_and_p.rightCols(5);
  const TestType gap(42.f);
  for (const Options& options : {recurrent(), chunk(16)}) {
    Rows o = Rows::Constant(20, 21, gap);
    momentum_delta::forward(x, {.o = o.middleCols(1, 19)}, options);
    CHECK(o.middleCols(1, 19) == rows(cast<TestType>(examples::run(s.x, options).o)));
    for (const int column : {0, 20}) CHECK((o.col(column).array() == gap).all());
  }
}

TEMPLATE_TEST_CASE("with a workspace, a second call in the Storage allocates nothing", "", bfloat16, half) {
  if (!heap_is_counted) return;
  const auto of_second = [](const auto& call) {
    call();
    return allocations_of(call);
  };
  Workspace workspace;
  const Stored<TestType> s({.B = 2, .T = 37, .HK = 1, .HV = 2, .K = 33, .V = 65}, P::of_keys);
  const Inputs<float, TestType> x = s.inputs();
  StoredResults<TestType> z(s.x);
  const Outputs<float, TestType> outputs = z.outputs();
  StoredGradients<TestType> dx(some_gradients<TestType>(s.x));
  const InputGradients<float, TestType> gradients = dx.views(false);
  const OutputGradients<float, TestType> upstream = s.upstream();
  for (Options options : {recurrent(), chunk(16)}) {
    INFO("algorithm " << int(options.algorithm));
    options.workspace = &workspace;
    CHECK(of_second([&] { momentum_delta::forward(x, outputs, options); }) == 0);
    Saved<float> saved(2);
    CHECK(of_second([&] { momentum_delta::forward(x, outputs, saved, options); }) == 0);
    CHECK(of_second([&] { momentum_delta::backward(x, saved, upstream, gradients, options); }) == 0);
  }
  Stored<TestType> one({.B = 2, .T = 1, .HK = 1, .HV = 2, .K = 33, .V = 65}, P::of_keys);
  StoredResults<TestType> y(one.x);
  y.states = {{}, one.x.initial_S, one.x.initial_M};
  one.x.initial_S = one.x.initial_M = {};
  const Inputs<float, TestType> token = one.inputs();
  const Outputs<float, TestType> to = y.outputs();
  CHECK(of_second([&] {
          momentum_delta::step(token, to.final_S, to.final_M, to.o, {.workspace = &workspace});
        }) == 0);
}
