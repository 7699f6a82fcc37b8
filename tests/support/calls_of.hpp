// The calls of calls.hpp, for the files that compile them.
#pragma once

#include <cstring>

#include "calls.hpp"

namespace test {

// The tensors of some calls, in a test's memory.
class Stage {
 public:
  explicit Stage(Circumstances& c) : c_(c) {}

  // Views of T; `values`, rounded to T. Absent stays absent.
  template <class View, class From>
  View input(const Array<From>& values) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(View::data)>>;
    if (values.absent()) return {};
    std::size_t i = 0;
    return make_view<View, T>(values.shape, [&](T& to) { to = T(values.values[i++]); });
  }
  template <class View, class From>
  View output(const Array<From>& like) {
    return filled<View>(like.shape, c_.before());
  }
  template <class View>
  View output(const std::vector<Index>& shape) {
    return filled<View>(shape, c_.before());
  }
  template <class View>
  View filled(const std::vector<Index>& shape, double value) {
    using T = std::remove_pointer_t<decltype(View::data)>;
    if (shape.empty()) return {};
    return make_view<View, T>(shape, [&](T& to) { to = T(value); });
  }
  // The same, in contiguous memory of its own.
  template <class T, class From>
  std::span<const T> input_span(std::span<const From> values) {
    using View = momentum_delta::ArrayView<const T, 1>;
    const Array<From> array{{Index(values.size())}, {values.begin(), values.end()}};
    return {input<View>(array).data, values.size()};
  }
  template <class T>
  std::span<T> output_span(std::size_t size) {
    return {output<momentum_delta::ArrayView<T, 1>>(std::vector<Index>{Index(size)}).data, size};
  }

  template <class Call>
  void call(const std::string& name, const Call& call) {
    name_ = name;
    c_.make(name, call);
  }

  // What the last call left in a tensor.
  template <class View>
  void keep(const std::string& name, const View& view) {
    if (view.absent()) return;
    std::vector<std::byte>& bytes = given[name_ + ": " + name];
    bytes.clear();
    for_each(view, [&](const auto& value) {
      const auto* const from = reinterpret_cast<const std::byte*>(&value);
      bytes.insert(bytes.end(), from, from + sizeof value);
    });
  }
  template <class T>
  void keep(const std::string& name, std::span<T> values) {
    keep(name, momentum_delta::ArrayView<T, 1>(values.data(), {Index(values.size())}));
  }

  Given given;

 private:
  // visit(element), in the order of the indices.
  template <class View, class Visit>
  static void for_each(const View& view, const Visit& visit, std::size_t d = 0, Index offset = 0) {
    if (d == view.shape.size()) {
      visit(view.data[offset]);
      return;
    }
    for (Index i = 0; i < view.shape[d]; ++i) for_each(view, visit, d + 1, offset + i * view.stride[d]);
  }

  template <class View, class T, class Set>
  View make_view(const std::vector<Index>& sizes, const Set& set) {
    decltype(View::shape) shape{};
    std::copy_n(sizes.begin(), shape.size(), shape.begin());
    momentum_delta::StridedView<T, std::tuple_size_v<decltype(View::shape)>> view(nullptr, shape);
    view.data = reinterpret_cast<T*>(c_.place(sizeof(T), view.shape, view.stride));
    for_each(view, set);
    return View(view.data, view.shape, view.stride);
  }

  Circumstances& c_;
  std::string name_;
};

template <class Scalar, class Storage>
Given rule_calls(const Problem<double>& x, const Upstream<double>& dy, Index chunk_size, Circumstances& c) {
  namespace md = momentum_delta;
  using TokensIn = md::TokenView<const Storage>;
  using Tokens = md::TokenView<Storage>;
  using GateIn = md::GateView<const Scalar>;
  using StateIn = md::StateView<const Scalar>;
  using State = md::StateView<Scalar>;
  Stage stage(c);
  const md::Inputs<Scalar, Storage> in{.q = stage.input<TokensIn>(x.q),
                                       .k = stage.input<TokensIn>(x.k),
                                       .v = stage.input<TokensIn>(x.v),
                                       .p = stage.input<TokensIn>(x.p),
                                       .log_alpha = stage.input<GateIn>(x.log_alpha),
                                       .log_mu = stage.input<GateIn>(x.log_mu),
                                       .beta = stage.input<GateIn>(x.beta),
                                       .eta = stage.input<GateIn>(x.eta),
                                       .initial_S = stage.input<StateIn>(x.initial_S),
                                       .initial_M = stage.input<StateIn>(x.initial_M),
                                       .cu_seqlens = stage.input_span<Index, Index>(x.cu_seqlens)};
  const md::OutputGradients<Scalar, Storage> upstream{.do_ = stage.input<TokensIn>(dy.do_),
                                                      .dfinal_S = stage.input<StateIn>(dy.dfinal_S),
                                                      .dfinal_M = stage.input<StateIn>(dy.dfinal_M)};
  const std::vector<Index> states = x.state_shape();
  const auto forward = [&](const std::string& name, const auto& run) {
    const md::Outputs<Scalar, Storage> y{stage.output<Tokens>(x.v), stage.output<State>(states),
                                         stage.output<State>(states)};
    stage.call(name, [&](md::Workspace* workspace) { run(y, workspace); });
    stage.keep("o", y.o);
    stage.keep("final_S", y.final_S);
    stage.keep("final_M", y.final_M);
  };
  for (const md::Algorithm form : {Algorithm::recurrent, Algorithm::chunk, Algorithm::automatic}) {
    const std::string form_name = std::to_string(int(form));
    md::Options options{.algorithm = form};
    if (form == Algorithm::chunk) options.chunk_size = chunk_size;
    forward("forward " + form_name, [&](const auto& y, md::Workspace* workspace) {
      options.workspace = workspace;
      md::forward(in, y, options);
    });
    for (const bool keep_u : {false, true}) {
      md::Saved<Scalar> saved(2, keep_u);
      options.chunk_size = chunk_size;
      forward("forward " + form_name + (keep_u ? ", saved with u" : ", saved"),
              [&](const auto& y, md::Workspace* workspace) {
                options.workspace = workspace;
                md::forward(in, y, saved, options);
              });
      for (const bool accumulate : {false, true}) {
        const auto like = [&]<class View>(View, const auto& input) {
          return stage.filled<View>(input.shape, accumulate ? 1. : c.before());
        };
        const md::InputGradients<Scalar, Storage> dx{.dq = like(Tokens(), x.q),
                                                     .dk = like(Tokens(), x.k),
                                                     .dv = like(Tokens(), x.v),
                                                     .dp = like(Tokens(), x.p),
                                                     .dlog_alpha = like(md::GateView<Scalar>(), x.log_alpha),
                                                     .dlog_mu = like(md::GateView<Scalar>(), x.log_mu),
                                                     .dbeta = like(md::GateView<Scalar>(), x.beta),
                                                     .deta = like(md::GateView<Scalar>(), x.eta),
                                                     .dinitial_S = like(State(), x.initial_S),
                                                     .dinitial_M = like(State(), x.initial_M),
                                                     .accumulate = accumulate};
        stage.call("backward " + form_name + (keep_u ? " with u" : "") + (accumulate ? ", added" : ""),
                   [&](md::Workspace* workspace) {
                     options.workspace = workspace;
                     md::backward(in, saved, upstream, dx, options);
                   });
        stage.keep("dq", dx.dq);
        stage.keep("dk", dx.dk);
        stage.keep("dv", dx.dv);
        stage.keep("dp", dx.dp);
        stage.keep("dlog_alpha", dx.dlog_alpha);
        stage.keep("dlog_mu", dx.dlog_mu);
        stage.keep("dbeta", dx.dbeta);
        stage.keep("deta", dx.deta);
        stage.keep("dinitial_S", dx.dinitial_S);
        stage.keep("dinitial_M", dx.dinitial_M);
      }
    }
  }
  if (x.v.shape[1] > 0 && x.cu_seqlens.empty()) {
    std::vector<Index> one_token = x.v.shape;
    one_token[1] = 1;
    const State S = stage.input<State>(x.initial_S), M = stage.input<State>(x.initial_M);
    const Tokens o = stage.output<Tokens>(one_token);
    stage.call("step", [&](md::Workspace* workspace) {
      md::step(step_inputs(in, 0), S, M, o, {.workspace = workspace});
    });
    stage.keep("o", o);
    stage.keep("S", S);
    stage.keep("M", M);
  }
  return stage.given;
}

template <class Scalar, class Storage>
Given scan_calls(const ScanProblem<double>& x, const ScanUpstream<double>& dy, Index chunk_size,
                 Circumstances& c) {
  namespace md = momentum_delta;
  using TokensIn = md::ArrayView<const Storage, 3>;
  using Tokens = md::ArrayView<Storage, 3>;
  using GroupsIn = md::TokenView<const Storage>;
  using Groups = md::TokenView<Storage>;
  using ChannelsIn = md::ArrayView<const Scalar, 1>;
  using Channels = md::ArrayView<Scalar, 1>;
  using StatesIn = md::ArrayView<const Scalar, 3>;
  using States = md::ArrayView<Scalar, 3>;
  Stage stage(c);
  md::ScanInputs<Scalar, Storage> in{.u = stage.input<TokensIn>(x.u),
                                     .delta = stage.input<TokensIn>(x.delta),
                                     .A = stage.input<md::ArrayView<const Scalar, 2>>(x.A),
                                     .B = stage.input<GroupsIn>(x.B),
                                     .C = stage.input<GroupsIn>(x.C),
                                     .D = stage.input<ChannelsIn>(x.D),
                                     .z = stage.input<TokensIn>(x.z),
                                     .delta_bias = stage.input<ChannelsIn>(x.delta_bias),
                                     .initial_state = stage.input<StatesIn>(x.initial_state),
                                     .delta_softplus = x.delta_softplus};
  const md::ScanOutputGradients<Scalar, Storage> upstream{
      .dout = stage.input<TokensIn>(dy.dout), .dfinal_state = stage.input<StatesIn>(dy.dfinal_state)};
  const auto forward = [&](const std::string& name, const auto& run) {
    const md::ScanOutputs<Scalar, Storage> y{stage.output<Tokens>(x.u),
                                             stage.output<States>(x.state_shape())};
    stage.call(name, [&](md::Workspace* workspace) { run(y, workspace); });
    stage.keep("out", y.out);
    stage.keep("final_state", y.final_state);
  };
  for (const md::Algorithm form : {Algorithm::recurrent, Algorithm::chunk}) {
    const std::string form_name = std::to_string(int(form));
    md::ScanOptions options{.algorithm = form, .chunk_size = chunk_size};
    forward("scan_forward " + form_name, [&](const auto& y, md::Workspace* workspace) {
      options.workspace = workspace;
      md::scan_forward(in, y, options);
    });
    md::ScanSaved<Scalar> saved;
    forward("scan_forward " + form_name + ", saved", [&](const auto& y, md::Workspace* workspace) {
      options.workspace = workspace;
      md::scan_forward(in, y, saved, options);
    });
    for (const bool accumulate : {false, true}) {
      const auto like = [&]<class View>(View, const std::vector<Index>& shape) {
        return stage.filled<View>(shape, accumulate ? 1. : c.before());
      };
      const md::ScanInputGradients<Scalar, Storage> dx{.du = like(Tokens(), x.u.shape),
                                                       .ddelta = like(Tokens(), x.delta.shape),
                                                       .dA = like(md::ArrayView<Scalar, 2>(), x.A.shape),
                                                       .dB = like(Groups(), x.B.shape),
                                                       .dC = like(Groups(), x.C.shape),
                                                       .dD = like(Channels(), x.D.shape),
                                                       .dz = like(Tokens(), x.z.shape),
                                                       .ddelta_bias = like(Channels(), x.delta_bias.shape),
                                                       .dinitial_state = like(States(), x.state_shape()),
                                                       .accumulate = accumulate};
      stage.call("scan_backward " + form_name + (accumulate ? ", added" : ""), [&](md::Workspace* workspace) {
        options.workspace = workspace;
        md::scan_backward(in, saved, upstream, dx, options);
      });
      stage.keep("du", dx.du);
      stage.keep("ddelta", dx.ddelta);
      stage.keep("dA", dx.dA);
      stage.keep("dB", dx.dB);
      stage.keep("dC", dx.dC);
      stage.keep("dD", dx.dD);
      stage.keep("dz", dx.dz);
      stage.keep("ddelta_bias", dx.ddelta_bias);
      stage.keep("dinitial_state", dx.dinitial_state);
    }
  }
  if (x.u.shape[1] > 0) {
    md::ScanInputs<Scalar, Storage> token = in;
    for (auto* view : {&token.u, &token.delta, &token.z}) *view = token_of(*view, 0);
    for (auto* view : {&token.B, &token.C}) *view = token_of(*view, 0);
    token.initial_state = {};
    const States state = stage.input<States>(x.initial_state);
    const Tokens out = stage.output<Tokens>(std::vector<Index>{x.u.shape[0], 1, x.u.shape[2]});
    stage.call("scan_step",
               [&](md::Workspace* workspace) { md::scan_step(token, state, out, {.workspace = workspace}); });
    stage.keep("out", out);
    stage.keep("state", state);
  }
  return stage.given;
}

template <class Scalar>
Given parameter_calls(const Shape& s, Circumstances& c) {
  namespace md = momentum_delta;
  using In = md::TokenView<const Scalar>;
  using Out = md::TokenView<Scalar>;
  using GateIn = md::GateView<const Scalar>;
  using Gate = md::GateView<Scalar>;
  using ArrayIn = md::ArrayView<const Scalar, 2>;
  using Matrix = md::ArrayView<Scalar, 2>;
  Stage stage(c);
  Random random(1);
  const auto normal = [&](std::vector<Index> shape) {
    Array<double> x = examples::zeros<double>(std::move(shape));
    for (double& value : x.values) value = float(random.normal());
    return x;
  };
  const auto none = [](const auto& call) { return [=](md::Workspace*) { call(); }; };
  const std::vector<Index> keys{s.B, s.T, s.HK, s.K}, values{s.B, s.T, s.HV, s.K}, gates{s.B, s.T, s.HV};

  const In k = stage.input<In>(normal(keys)), dk = stage.input<In>(normal(keys));
  const Out unit = stage.output<Out>(keys), dunit = stage.output<Out>(keys);
  stage.call("l2_normalize", none([&] { md::l2_normalize<Scalar>(k, unit); }));
  stage.keep("y", unit);
  stage.call("l2_normalize_backward", none([&] { md::l2_normalize_backward<Scalar>(k, dk, dunit); }));
  stage.keep("dx", dunit);

  Array<double> decays = normal(gates);
  for (double& value : decays.values) value = -std::abs(value);
  const GateIn log_alpha = stage.input<GateIn>(decays);
  const Out p = stage.output<Out>(values), dkey = stage.output<Out>(keys);
  const In dp = stage.input<In>(normal(values));
  const Gate dlog_alpha = stage.output<Gate>(gates);
  stage.call("decay_keys", none([&] { md::decay_keys<Scalar>(k, log_alpha, p); }));
  stage.keep("p", p);
  stage.call("decay_keys_backward",
             none([&] { md::decay_keys_backward<Scalar>(k, log_alpha, dp, dkey, dlog_alpha); }));
  stage.keep("dk", dkey);
  stage.keep("dlog_alpha", dlog_alpha);

  const auto gate_in = [&] { return stage.input<GateIn>(normal(gates)); };
  const auto gate_out = [&] { return stage.output<Gate>(gates); };
  const auto parameter_in = [&] { return stage.input_span<Scalar, double>(normal({s.HV}).values); };
  const auto parameter_out = [&] { return stage.output_span<Scalar>(std::size_t(s.HV)); };
  const md::RawGates<const Scalar> raw{gate_in(), gate_in(), gate_in(), gate_in()};
  const md::GateParameters<const Scalar> parameters{parameter_in(), parameter_in(), parameter_in(),
                                                    parameter_in(), parameter_in()};
  const md::Gates<const Scalar> dy{gate_in(), gate_in(), gate_in(), gate_in()};
  const md::Gates<Scalar> y{gate_out(), gate_out(), gate_out(), gate_out()};
  const md::RawGates<Scalar> draw{gate_out(), gate_out(), gate_out(), gate_out()};
  const md::GateParameters<Scalar> dparameters{parameter_out(), parameter_out(), parameter_out(),
                                               parameter_out(), parameter_out()};
  stage.call("gates", none([&] { md::gates<Scalar>(raw, parameters, y); }));
  stage.keep("log_alpha", y.log_alpha);
  stage.keep("log_mu", y.log_mu);
  stage.keep("beta", y.beta);
  stage.keep("eta", y.eta);
  stage.call("gates_backward",
             none([&] { md::gates_backward<Scalar>(raw, parameters, dy, draw, dparameters); }));
  stage.keep("da", draw.a);
  stage.keep("db", draw.b);
  stage.keep("dm", draw.m);
  stage.keep("de", draw.e);
  stage.keep("dA_log", dparameters.A_log);
  stage.keep("ddt_bias", dparameters.dt_bias);
  stage.keep("dMu_log", dparameters.Mu_log);
  stage.keep("dmu_bias", dparameters.mu_bias);
  stage.keep("dlog_factor", dparameters.log_factor);

  const std::vector<Index> rates{s.T, s.K};
  const ArrayIn A_log = stage.input<ArrayIn>(normal(rates)), dA = stage.input<ArrayIn>(normal(rates));
  const Matrix A = stage.output<Matrix>(rates), dA_log = stage.output<Matrix>(rates);
  stage.call("negative_exp", none([&] { md::negative_exp<Scalar>(A_log, A); }));
  stage.keep("A", A);
  stage.call("negative_exp_backward", none([&] { md::negative_exp_backward<Scalar>(A, dA, dA_log); }));
  stage.keep("dA_log", dA_log);
  return stage.given;
}

template <class Scalar>
Given layer_calls(const momentum_delta::LayerConfig& config, Index B, Index T, Circumstances& c) {
  namespace md = momentum_delta;
  using In = md::TokenView<const Scalar>;
  using Out = md::TokenView<Scalar>;
  Stage stage(c);
  Random random(1);
  const auto normal = [&](std::vector<Index> shape) {
    Array<double> x = examples::zeros<double>(std::move(shape));
    for (double& value : x.values) value = float(random.normal());
    return x;
  };
  std::vector<Scalar> memory(std::size_t(md::parameter_count(config)));
  const md::LayerWeights<Scalar> initial(config, memory.data());
  md::initialize_weights(config, initial, [&] { return random.uniform(); });
  md::Layer<Scalar> layer{config, {}};
  md::LayerWeights<Scalar> dweights;
  const auto place = [&](const char*, const md::WeightShape&, std::span<Scalar> from,
                         std::span<const Scalar>& to, std::span<Scalar>& gradient) {
    to = stage.input_span<Scalar, Scalar>(from);
    gradient = stage.output_span<Scalar>(from.size());
  };
  md::for_each_weight(config, place, initial, layer.weights, dweights);

  const std::vector<Index> tokens{B, T, 1, config.hidden_size};
  const In x = stage.input<In>(normal(tokens)), dy = stage.input<In>(normal(tokens));
  const auto output = [&](const std::string& name, const auto& run) {
    const Out y = stage.output<Out>(tokens);
    stage.call(name, [&](md::Workspace* workspace) { run(y, workspace); });
    stage.keep("y", y);
  };
  for (const md::Algorithm form : {Algorithm::recurrent, Algorithm::chunk}) {
    const std::string form_name = std::to_string(int(form));
    md::LayerCache<Scalar> cache(config, B);
    md::LayerOptions<Scalar> options{.rule = {.algorithm = form}};
    output("layer_forward " + form_name, [&](const Out& y, md::Workspace* workspace) {
      options.rule.workspace = workspace;
      md::layer_forward(layer, x, y, options);
    });
    options.cache = &cache;
    output("layer_forward " + form_name + ", cache", [&](const Out& y, md::Workspace* workspace) {
      options.rule.workspace = workspace;
      md::layer_forward(layer, x, y, options);
    });
    options.cache = nullptr;
    if (T > 0) {
      const Out y = stage.output<Out>(std::vector<Index>{B, 1, 1, config.hidden_size});
      stage.call("layer_step " + form_name, [&](md::Workspace* workspace) {
        md::layer_step(layer, token_of(x, 0), y, cache, {.rule = {.workspace = workspace}});
      });
      stage.keep("y", y);
    }
    md::LayerSaved<Scalar> saved(2);
    output("layer_forward " + form_name + ", saved", [&](const Out& y, md::Workspace* workspace) {
      options.rule.workspace = workspace;
      md::layer_forward(layer, x, y, saved, options);
    });
    const Out dx = stage.output<Out>(tokens);
    stage.call("layer_backward " + form_name, [&](md::Workspace* workspace) {
      options.rule.workspace = workspace;
      md::layer_backward(layer, x, saved, dy, {.dx = dx, .dweights = dweights}, options);
    });
    stage.keep("dx", dx);
    const auto keep = [&](const char* name, const md::WeightShape&, std::span<Scalar> gradient) {
      stage.keep(name, gradient);
    };
    md::for_each_weight(config, keep, dweights);
  }
  return stage.given;
}

}  // namespace test

// The calls that take tokens in Storage; then those that do not.
#define TEST_STORED_CALLS(Scalar, Storage)                                                                   \
  namespace test {                                                                                           \
  template Given rule_calls<Scalar, Storage>(const Problem<double>&, const Upstream<double>&, Index,         \
                                             Circumstances&);                                                \
  template Given scan_calls<Scalar, Storage>(const ScanProblem<double>&, const ScanUpstream<double>&, Index, \
                                             Circumstances&);                                                \
  }
#define TEST_CALLS(Scalar)                                                                              \
  TEST_STORED_CALLS(Scalar, Scalar)                                                                     \
  namespace test {                                                                                      \
  template Given parameter_calls<Scalar>(const Shape&, Circumstances&);                                 \
  template Given layer_calls<Scalar>(const momentum_delta::LayerConfig&, Index, Index, Circumstances&); \
  }
