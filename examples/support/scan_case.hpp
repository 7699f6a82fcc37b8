// A selective scan held in memory of its own, and how to read one from a .safetensors file with the metadata
// "kind" = "selective_scan":
//   u delta [B,T,D], A [D,N], B C [B,T,G,N], z [B,T,D], D delta_bias [D], initial_state [B,D,N], of which z
//   and those after it may be missing; metadata "delta_softplus", True or False (missing: True).
// Expected values are out [B,T,D] and final_state [B,D,N]; the gradient dX of the loss sum(out*dout) +
// sum(final_state*dfinal_state) has the shape of X.
#pragma once

#include "case_file.hpp"

namespace examples {

inline constexpr const char* scan_kind = "selective_scan";

template <class Scalar>
struct ScanProblem {
  Array<Scalar> u, delta, A, B, C, D, z, delta_bias, initial_state;
  bool delta_softplus = true;

  std::vector<Index> state_shape() const { return {u.shape.at(0), u.shape.at(2), A.shape.at(1)}; }

  momentum_delta::ScanInputs<Scalar> inputs() const {
    using Tokens = momentum_delta::ArrayView<const Scalar, 3>;
    using Channels = momentum_delta::ArrayView<const Scalar, 1>;
    using Groups = momentum_delta::TokenView<const Scalar>;
    return {.u = u.template view<Tokens>(),
            .delta = delta.template view<Tokens>(),
            .A = A.template view<momentum_delta::ArrayView<const Scalar, 2>>(),
            .B = B.template view<Groups>(),
            .C = C.template view<Groups>(),
            .D = D.template view<Channels>(),
            .z = z.template view<Tokens>(),
            .delta_bias = delta_bias.template view<Channels>(),
            .initial_state = initial_state.template view<Tokens>(),
            .delta_softplus = delta_softplus};
  }

  template <class To>
  ScanProblem<To> as() const {
    return {cast<To>(u),   cast<To>(delta),      cast<To>(A),
            cast<To>(B),   cast<To>(C),          cast<To>(D),
            cast<To>(z),   cast<To>(delta_bias), cast<To>(initial_state),
            delta_softplus};
  }
};

template <class Scalar>
struct ScanResults {
  Array<Scalar> out, final_state;

  momentum_delta::ScanOutputs<Scalar> outputs() {
    using Tokens = momentum_delta::ArrayView<Scalar, 3>;
    return {.out = out.template view<Tokens>(), .final_state = final_state.template view<Tokens>()};
  }
};

template <class Scalar>
ScanResults<Scalar> run(const ScanProblem<Scalar>& problem, const momentum_delta::ScanOptions& options) {
  ScanResults<Scalar> y{unwritten<Scalar>(problem.u.shape), unwritten<Scalar>(problem.state_shape())};
  momentum_delta::scan_forward(problem.inputs(), y.outputs(), options);
  return y;
}

// The gradients of a loss by the outputs; absent ones are 0.
template <class Scalar>
struct ScanUpstream {
  Array<Scalar> dout, dfinal_state;

  bool absent() const { return dout.absent() && dfinal_state.absent(); }

  momentum_delta::ScanOutputGradients<Scalar> views() const {
    using Tokens = momentum_delta::ArrayView<const Scalar, 3>;
    return {.dout = dout.template view<Tokens>(), .dfinal_state = dfinal_state.template view<Tokens>()};
  }

  template <class To>
  ScanUpstream<To> as() const {
    return {cast<To>(dout), cast<To>(dfinal_state)};
  }
};

// Its gradients by the inputs.
template <class Scalar>
struct ScanGradients {
  Array<Scalar> du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state;

  // visit(name, get, get_input) for each, as in Gradients.
  template <class Visit>
  static void for_each(const Visit& visit) {
#define EXAMPLES_GRADIENT(x) \
  visit(                     \
      "d" #x, [](auto& g) -> auto& { return g.d##x; }, [](auto& problem) -> auto& { return problem.x; })
    EXAMPLES_GRADIENT(u);
    EXAMPLES_GRADIENT(delta);
    EXAMPLES_GRADIENT(A);
    EXAMPLES_GRADIENT(B);
    EXAMPLES_GRADIENT(C);
    EXAMPLES_GRADIENT(D);
    EXAMPLES_GRADIENT(z);
    EXAMPLES_GRADIENT(delta_bias);
    EXAMPLES_GRADIENT(initial_state);
#undef EXAMPLES_GRADIENT
  }

  momentum_delta::ScanInputGradients<Scalar> views() {
    using Tokens = momentum_delta::ArrayView<Scalar, 3>;
    using Channels = momentum_delta::ArrayView<Scalar, 1>;
    using Groups = momentum_delta::TokenView<Scalar>;
    return {.du = du.template view<Tokens>(),
            .ddelta = ddelta.template view<Tokens>(),
            .dA = dA.template view<momentum_delta::ArrayView<Scalar, 2>>(),
            .dB = dB.template view<Groups>(),
            .dC = dC.template view<Groups>(),
            .dD = dD.template view<Channels>(),
            .dz = dz.template view<Tokens>(),
            .ddelta_bias = ddelta_bias.template view<Channels>(),
            .dinitial_state = dinitial_state.template view<Tokens>()};
  }
};

// Every gradient there is for the problem: those of absent inputs stay absent, but for the initial state's.
template <class Scalar>
ScanGradients<Scalar> unwritten_gradients(const ScanProblem<Scalar>& problem) {
  ScanGradients<Scalar> dx;
  ScanGradients<Scalar>::for_each([&](const std::string& name, auto get, auto get_input) {
    const auto& shape = name == "dinitial_state" ? problem.state_shape() : get_input(problem).shape;
    if (!shape.empty()) get(dx) = unwritten<Scalar>(shape);
  });
  return dx;
}

template <class Scalar>
ScanGradients<Scalar> run_backward(const ScanProblem<Scalar>& problem, const ScanUpstream<Scalar>& dy,
                                   const momentum_delta::ScanOptions& options) {
  momentum_delta::ScanSaved<Scalar> saved;
  ScanResults<Scalar> y{unwritten<Scalar>(problem.u.shape), {}};
  momentum_delta::scan_forward(problem.inputs(), y.outputs(), saved, options);
  ScanGradients<Scalar> dx = unwritten_gradients(problem);
  momentum_delta::scan_backward(problem.inputs(), saved, dy.views(), dx.views(), options);
  return dx;
}

// A problem and, where the file has them, the values and gradients it expects.
struct ScanCase {
  ScanProblem<double> problem;
  ScanResults<double> expected;
  ScanUpstream<double> upstream;
  ScanGradients<double> gradients;
};

inline ScanCase read_scan_case(const safetensors::File& file) {
  const auto fail = [](const std::string& what) { throw std::runtime_error(what); };
  const auto read = [&](const std::string& name, std::size_t rank, bool required = false) {
    return read_array(file, name, rank, required);
  };

  ScanCase c;
  ScanProblem<double>& x = c.problem;
  x.u = read("u", 3, true);
  x.delta = read("delta", 3, true);
  x.A = read("A", 2, true);
  x.B = read("B", 4, true);
  x.C = read("C", 4, true);
  x.D = read("D", 1);
  x.z = read("z", 3);
  x.delta_bias = read("delta_bias", 1);
  x.initial_state = read("initial_state", 3);
  if (const auto found = file.metadata.find("delta_softplus"); found != file.metadata.end()) {
    if (found->second != "True" && found->second != "False")
      fail("its delta_softplus, \"" + found->second + "\", is not True or False");
    x.delta_softplus = found->second == "True";
  }

  c.expected = {read("out", 3), read("final_state", 3)};
  const auto same_shape = [&](const std::string& name, const Array<double>& y,
                              const std::vector<Index>& shape) {
    if (!y.absent() && y.shape != shape) fail(name + " has not the shape that u and A call for");
  };
  same_shape("out", c.expected.out, x.u.shape);
  same_shape("final_state", c.expected.final_state, x.state_shape());
  c.upstream = {read("dout", 3), read("dfinal_state", 3)};
  ScanGradients<double>::for_each([&](const std::string& name, auto get, auto get_input) {
    const bool state = name == "dinitial_state";
    const Array<double>& input = get_input(x);
    if (input.absent() && !state && file.has(name)) fail(name + " is given, but its input is missing");
    const std::vector<Index> shape = state ? x.state_shape() : input.shape;
    get(c.gradients) = read(name, shape.size());
    same_shape(name, get(c.gradients), shape);
  });
  return c;
}

}  // namespace examples
