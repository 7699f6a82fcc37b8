// A momentum delta rule problem held in memory of its own, and how to read one from a .safetensors file:
//   q k [B,T,HK,K], p [B,T,HK or HV,K], v [B,T,HV,V], log_alpha log_mu beta eta [B,T,HV],
//   initial_S initial_M [N,HV,K,V], cu_seqlens [N+1], metadata "scale"; all but q, k and v may be missing.
// Expected values are o [B,T,HV,V], final_S and final_M; the gradient dX of the loss sum(o*do) +
// sum(final_S*dfinal_S) + sum(final_M*dfinal_M) has the shape of X.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <momentum_delta/momentum_delta.hpp>
#include <optional>
#include <string>
#include <vector>

#include "safetensors.hpp"

namespace examples {

using momentum_delta::Index;

// A dense tensor; an empty shape stands for an absent one.
template <class Scalar>
struct Array {
  std::vector<Index> shape;
  std::vector<Scalar> values;

  bool absent() const { return shape.empty(); }

  template <class View>
  View view() const {
    return absent() ? View{} : make<View>(values.data());
  }
  template <class View>
  View view() {
    return absent() ? View{} : make<View>(values.data());
  }

 private:
  template <class View, class Pointer>
  View make(Pointer data) const {
    decltype(View::shape) sizes{};
    if (shape.size() != sizes.size())
      throw std::runtime_error("a tensor has " + std::to_string(shape.size()) + " dimensions, not " +
                               std::to_string(sizes.size()));
    std::copy(shape.begin(), shape.end(), sizes.begin());
    return View(data, sizes);
  }
};

template <class Scalar>
Array<Scalar> zeros(std::vector<Index> shape) {
  Index size = 1;
  for (const Index d : shape) size *= d;
  return {std::move(shape), std::vector<Scalar>(std::size_t(size))};
}

// Filled with NaN, so that what a call should have written and did not is seen.
template <class Scalar>
Array<Scalar> unwritten(std::vector<Index> shape) {
  Array<Scalar> x = zeros<Scalar>(std::move(shape));
  std::fill(x.values.begin(), x.values.end(), Scalar(std::numeric_limits<double>::quiet_NaN()));
  return x;
}

// The number that the whole text spells, if it does.
template <class Number>
std::optional<Number> number(const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

template <class To, class From>
Array<To> cast(const Array<From>& x) {
  return {x.shape, std::vector<To>(x.values.begin(), x.values.end())};
}

template <class Scalar>
struct Problem {
  Array<Scalar> q, k, v, p, log_alpha, log_mu, beta, eta, initial_S, initial_M;
  std::vector<Index> cu_seqlens;
  std::optional<Scalar> scale;

  Index states() const { return cu_seqlens.empty() ? v.shape.at(0) : Index(cu_seqlens.size()) - 1; }
  std::vector<Index> state_shape() const { return {states(), v.shape.at(2), k.shape.at(3), v.shape.at(3)}; }

  momentum_delta::Inputs<Scalar> inputs() const {
    using Token = momentum_delta::TokenView<const Scalar>;
    using Gate = momentum_delta::GateView<const Scalar>;
    using State = momentum_delta::StateView<const Scalar>;
    return {.q = q.template view<Token>(),
            .k = k.template view<Token>(),
            .v = v.template view<Token>(),
            .p = p.template view<Token>(),
            .log_alpha = log_alpha.template view<Gate>(),
            .log_mu = log_mu.template view<Gate>(),
            .beta = beta.template view<Gate>(),
            .eta = eta.template view<Gate>(),
            .initial_S = initial_S.template view<State>(),
            .initial_M = initial_M.template view<State>(),
            .cu_seqlens = cu_seqlens,
            .scale = scale};
  }

  template <class To>
  Problem<To> as() const {
    std::optional<To> to_scale;
    if (scale) to_scale = To(*scale);
    return {cast<To>(q),         cast<To>(k),         cast<To>(v),    cast<To>(p),
            cast<To>(log_alpha), cast<To>(log_mu),    cast<To>(beta), cast<To>(eta),
            cast<To>(initial_S), cast<To>(initial_M), cu_seqlens,     to_scale};
  }
};

template <class Scalar>
struct Results {
  Array<Scalar> o, final_S, final_M;

  momentum_delta::Outputs<Scalar> outputs() {
    using State = momentum_delta::StateView<Scalar>;
    return {.o = o.template view<momentum_delta::TokenView<Scalar>>(),
            .final_S = final_S.template view<State>(),
            .final_M = final_M.template view<State>()};
  }
};

template <class Scalar>
Results<Scalar> run(const Problem<Scalar>& problem, const momentum_delta::Options& options) {
  Results<Scalar> y{unwritten<Scalar>(problem.v.shape), unwritten<Scalar>(problem.state_shape()),
                    unwritten<Scalar>(problem.state_shape())};
  momentum_delta::forward(problem.inputs(), y.outputs(), options);
  return y;
}

// The gradients of a loss by the outputs; absent ones are 0.
template <class Scalar>
struct Upstream {
  Array<Scalar> do_, dfinal_S, dfinal_M;

  bool absent() const { return do_.absent() && dfinal_S.absent() && dfinal_M.absent(); }

  momentum_delta::OutputGradients<Scalar> views() const {
    using State = momentum_delta::StateView<const Scalar>;
    return {.do_ = do_.template view<momentum_delta::TokenView<const Scalar>>(),
            .dfinal_S = dfinal_S.template view<State>(),
            .dfinal_M = dfinal_M.template view<State>()};
  }

  template <class To>
  Upstream<To> as() const {
    return {cast<To>(do_), cast<To>(dfinal_S), cast<To>(dfinal_M)};
  }
};

// Its gradients by the inputs.
template <class Scalar>
struct Gradients {
  Array<Scalar> dq, dk, dv, dp, dlog_alpha, dlog_mu, dbeta, deta, dinitial_S, dinitial_M;

  // visit(name, get, get_input) for each: get(g) is that array of any Gradients g, get_input(x) the array of
  // a Problem x that it is the gradient by.
  template <class Visit>
  static void for_each(const Visit& visit) {
#define EXAMPLES_GRADIENT(x) \
  visit(                     \
      "d" #x, [](auto& g) -> auto& { return g.d##x; }, [](auto& problem) -> auto& { return problem.x; })
    EXAMPLES_GRADIENT(q);
    EXAMPLES_GRADIENT(k);
    EXAMPLES_GRADIENT(v);
    EXAMPLES_GRADIENT(p);
    EXAMPLES_GRADIENT(log_alpha);
    EXAMPLES_GRADIENT(log_mu);
    EXAMPLES_GRADIENT(beta);
    EXAMPLES_GRADIENT(eta);
    EXAMPLES_GRADIENT(initial_S);
    EXAMPLES_GRADIENT(initial_M);
#undef EXAMPLES_GRADIENT
  }

  momentum_delta::InputGradients<Scalar> views() {
    using Token = momentum_delta::TokenView<Scalar>;
    using Gate = momentum_delta::GateView<Scalar>;
    using State = momentum_delta::StateView<Scalar>;
    return {.dq = dq.template view<Token>(),
            .dk = dk.template view<Token>(),
            .dv = dv.template view<Token>(),
            .dp = dp.template view<Token>(),
            .dlog_alpha = dlog_alpha.template view<Gate>(),
            .dlog_mu = dlog_mu.template view<Gate>(),
            .dbeta = dbeta.template view<Gate>(),
            .deta = deta.template view<Gate>(),
            .dinitial_S = dinitial_S.template view<State>(),
            .dinitial_M = dinitial_M.template view<State>()};
  }
};

// Every gradient there is for the problem: those of absent p and gates stay absent.
template <class Scalar>
Gradients<Scalar> run_backward(const Problem<Scalar>& problem, const Upstream<Scalar>& dy,
                               const momentum_delta::Options& options, Index checkpoint_interval = 1,
                               bool keep_u = false) {
  momentum_delta::Saved<Scalar> saved(checkpoint_interval, keep_u);
  Results<Scalar> y{zeros<Scalar>(problem.v.shape), {}, {}};
  momentum_delta::forward(problem.inputs(), y.outputs(), saved, options);
  Gradients<Scalar> dx;
  Gradients<Scalar>::for_each(
      [&](const char*, auto get, auto get_input) { get(dx).shape = get_input(problem).shape; });
  dx.dinitial_S.shape = dx.dinitial_M.shape = problem.state_shape();
  Gradients<Scalar>::for_each([&](const char*, auto get, auto) {
    if (!get(dx).absent()) get(dx) = unwritten<Scalar>(get(dx).shape);
  });
  momentum_delta::backward(problem.inputs(), saved, dy.views(), dx.views(), options);
  return dx;
}

// A problem and, where the file has them, the values and gradients it expects.
struct Case {
  Problem<double> problem;
  Results<double> expected;
  Upstream<double> upstream;
  Gradients<double> gradients;
};

// A tensor of so many dimensions, in double; absent if the file has none and it is not required. Throws
// std::runtime_error naming it if it is otherwise.
inline Array<double> read_array(const safetensors::File& file, const std::string& name, std::size_t rank,
                                bool required = false) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) {
    if (required) throw std::runtime_error(name + " is missing");
    return {};
  }
  const safetensors::Tensor& tensor = found->second;
  if (tensor.shape.size() != rank)
    throw std::runtime_error(name + " has " + std::to_string(tensor.shape.size()) + " dimensions, not " +
                             std::to_string(rank));
  try {
    return {tensor.shape, tensor.as<double>()};
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(name + " " + e.what());
  }
}

inline Case read_case(const safetensors::File& file) {
  const auto fail = [](const std::string& what) { throw std::runtime_error(what); };
  const auto read = [&](const std::string& name, std::size_t rank, bool required = false) {
    return read_array(file, name, rank, required);
  };

  Case c;
  Problem<double>& x = c.problem;
  x.q = read("q", 4, true);
  x.k = read("k", 4, true);
  x.v = read("v", 4, true);
  x.p = read("p", 4);
  x.log_alpha = read("log_alpha", 3);
  x.log_mu = read("log_mu", 3);
  x.beta = read("beta", 3);
  x.eta = read("eta", 3);
  x.initial_S = read("initial_S", 4);
  x.initial_M = read("initial_M", 4);
  if (file.has("cu_seqlens")) {
    const safetensors::Tensor& offsets = file.tensors.at("cu_seqlens");
    if (offsets.shape.size() != 1 || offsets.size() == 0)
      fail("cu_seqlens must have one dimension and an offset");
    try {
      x.cu_seqlens = offsets.as<Index>();
    } catch (const std::runtime_error& e) {
      fail(std::string("cu_seqlens ") + e.what());
    }
  }
  if (const auto found = file.metadata.find("scale"); found != file.metadata.end()) {
    x.scale = number<double>(found->second);
    if (!x.scale) fail("its scale, \"" + found->second + "\", is not a number");
  }

  c.expected = {read("o", 4), read("final_S", 4), read("final_M", 4)};
  const auto same_shape = [&](const char* name, const Array<double>& y, const std::vector<Index>& shape) {
    if (!y.absent() && y.shape != shape)
      fail(std::string(name) + " has not the shape that q, k and v call for");
  };
  same_shape("o", c.expected.o, x.v.shape);
  same_shape("final_S", c.expected.final_S, x.state_shape());
  same_shape("final_M", c.expected.final_M, x.state_shape());

  c.upstream = {read("do", 4), read("dfinal_S", 4), read("dfinal_M", 4)};
  Gradients<double>::for_each([&](const std::string& name, auto get, auto get_input) {
    const Array<double>& input = get_input(x);
    const bool state = name.starts_with("dinitial");
    if (input.absent() && !state && file.has(name)) fail(name + " is given, but its input is missing");
    get(c.gradients) = read(name, state ? 4 : input.shape.size());
    same_shape(name.c_str(), get(c.gradients), state ? x.state_shape() : input.shape);
  });
  return c;
}

// What a file is a case of: its metadata "kind", empty for the momentum delta rule.
inline std::string kind_of(const safetensors::File& file) {
  const auto found = file.metadata.find("kind");
  return found == file.metadata.end() ? "" : found->second;
}

struct Error {
  double rel_rms;  // rms(x - expected) / max(rms(expected), 1e-30)
  double max_rel;  // max |x - expected| / max(max |expected|, 1e-30)
};

template <class Scalar>
Error error_of(const Array<Scalar>& x, const Array<double>& expected) {
  long double sum = 0, sum_expected = 0;  // squares of double need its range
  double largest = 0, largest_expected = 0;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    const double e = expected.values[i], d = std::abs(double(x.values[i]) - e);
    sum += static_cast<long double>(d) * d;
    sum_expected += static_cast<long double>(e) * e;
    if (d > largest || std::isnan(d)) largest = d;  // a NaN stays
    largest_expected = std::max(largest_expected, std::abs(e));
  }
  const long double n = std::max<long double>(1, expected.values.size());
  return {double(std::sqrt(sum / n) / std::max(std::sqrt(sum_expected / n), 1e-30L)),
          largest / std::max(largest_expected, 1e-30)};
}

}  // namespace examples
