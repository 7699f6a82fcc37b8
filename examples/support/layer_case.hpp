// A MomentumDeltaNet layer and its tokens, read from a .safetensors file of metadata kind
// "momentum_deltanet_layer":
//   x [B,T,hidden], weight.NAME (NAME and shape as in momentum_delta/layer/weights.hpp), initial_S initial_M
//   [B,HV,K,V]; metadata hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, use_short_conv,
//   use_output_correction, gate (sigmoid or swish), min_log_mu (or None), tau_factor, norm_eps, conv_size.
// Expected values are y [B,T,hidden], final_S and final_M; dx and dweight.NAME are the gradients of
// sum(y*dy). The initial state and every expected tensor may be missing.
#pragma once

#include <momentum_delta/layer.hpp>

#include "case_file.hpp"

namespace examples {

inline constexpr const char* layer_kind = "momentum_deltanet_layer";

// Tensors by name.
template <class Scalar>
using Named = std::map<std::string, Array<Scalar>>;

struct LayerCase {
  momentum_delta::LayerConfig config;
  std::map<std::string, safetensors::Tensor> weights;  // weight.NAME
  Named<double> tensors;                               // x dy initial_S initial_M
  Named<double> values, gradients;                     // expected: y final_S final_M, and dx dweight.NAME
};

inline LayerCase read_layer_case(const safetensors::File& file) {
  const auto fail = [](const std::string& what) { throw std::runtime_error(what); };
  const auto text = [&](const char* key) {
    const auto found = file.metadata.find(key);
    if (found == file.metadata.end()) fail(std::string("its metadata have no ") + key);
    return found->second;
  };
  const auto real = [&](const char* key) {
    const auto value = number<double>(text(key));
    if (!value) fail(std::string("its ") + key + ", \"" + text(key) + "\", is not a number");
    return *value;
  };
  const auto integer = [&](const char* key) {
    const auto value = number<Index>(text(key));
    if (!value) fail(std::string("its ") + key + ", \"" + text(key) + "\", is not an integer");
    return *value;
  };
  const auto flag = [&](const char* key) {
    if (text(key) != "True" && text(key) != "False")
      fail(std::string("its ") + key + ", \"" + text(key) + "\", is not True or False");
    return text(key) == "True";
  };

  LayerCase c;
  momentum_delta::LayerConfig& config = c.config;
  config.hidden_size = integer("hidden_size");
  config.num_heads = integer("num_heads");
  config.num_v_heads = integer("num_v_heads");
  config.head_dim = integer("head_dim");
  config.head_v_dim = integer("head_v_dim");
  config.use_short_conv = flag("use_short_conv");
  config.conv_size = integer("conv_size");
  config.use_output_correction = flag("use_output_correction");
  if (text("gate") != "sigmoid" && text("gate") != "swish")
    fail("its gate, \"" + text("gate") + "\", is not sigmoid or swish");
  config.gate =
      text("gate") == "swish" ? momentum_delta::OutputGate::swish : momentum_delta::OutputGate::sigmoid;
  config.tau_factor = real("tau_factor");
  config.norm_eps = real("norm_eps");
  if (text("min_log_mu") != "None") config.gates.min_log_mu = real("min_log_mu");

  std::array<Index, 4> state{};
  try {
    state = momentum_delta::LayerCache<float>(config, 0).state_shape;
  } catch (const std::invalid_argument& e) {  // the configuration is unusable
    fail(e.what());
  }
  const auto x = file.tensors.find("x");
  if (x == file.tensors.end() || x->second.shape.size() != 3 || x->second.shape[2] != config.hidden_size)
    fail("x is missing or has not the shape [B, T, hidden_size]");
  std::vector<Index> state_shape(state.begin(), state.end());
  state_shape[0] = x->second.shape[0];
  const auto read = [&](Named<double>& to, const std::string& name, const std::vector<Index>& shape) {
    if (!file.has(name)) return;
    if (file.tensors.at(name).shape != shape)
      fail(name + " has not the shape that x and the metadata call for");
    to[name] = read_array(file, name, shape.size());
  };
  for (const char* name : {"x", "dy"}) read(c.tensors, name, x->second.shape);
  for (const char* name : {"initial_S", "initial_M"}) read(c.tensors, name, state_shape);
  read(c.values, "y", x->second.shape);
  for (const char* name : {"final_S", "final_M"}) read(c.values, name, state_shape);
  read(c.gradients, "dx", x->second.shape);
  momentum_delta::for_each_weight(config, [&](const char* name, const momentum_delta::WeightShape& shape) {
    read(c.gradients, std::string("dweight.") + name, {shape.dimensions().begin(), shape.dimensions().end()});
  });
  for (const auto& [name, tensor] : file.tensors)
    if (name.starts_with("weight.")) c.weights[name] = tensor;
  return c;
}

// A layer in memory of its own; a value.
template <class Scalar>
struct LayerInMemory {
  momentum_delta::LayerConfig config;
  std::vector<Scalar> memory;

  explicit LayerInMemory(const momentum_delta::LayerConfig& c)
      : config(c), memory(std::size_t(momentum_delta::parameter_count(c))) {}

  // Throws std::invalid_argument naming the weights that are missing or misshaped.
  explicit LayerInMemory(const LayerCase& c) : LayerInMemory(c.config) {
    const auto find = [&](const std::string& name) {
      const auto found = c.weights.find(name);
      return found == c.weights.end() ? nullptr : &found->second;
    };
    momentum_delta::load_weights(config, weights(), find, "weight.");
  }

  momentum_delta::LayerWeights<Scalar> weights() { return {config, memory.data()}; }
  momentum_delta::Layer<Scalar> layer() const {
    return {config, momentum_delta::LayerWeights<const Scalar>(config, memory.data())};
  }
};

// [B, T, hidden] as a layer takes it.
template <class View, class Tokens>
View hidden_view(Tokens& x) {
  return View(x.values.data(), {x.shape.at(0), x.shape.at(1), 1, x.shape.at(2)});
}

// The values, and with `backward` the gradients, of a layer for a case's x, initial state and dy, by the
// names that they have in its file.
template <class Scalar>
Named<Scalar> run_layer(const LayerCase& c, const momentum_delta::Options& rule, bool backward) {
  using In = momentum_delta::TokenView<const Scalar>;
  using Out = momentum_delta::TokenView<Scalar>;
  const LayerInMemory<Scalar> weights(c);
  const Array<Scalar> x = cast<Scalar>(c.tensors.at("x"));
  momentum_delta::LayerCache<Scalar> cache(c.config, x.shape[0]);
  const auto start = [&](const char* name, std::vector<Scalar>& state) {
    if (c.tensors.contains(name)) state = cast<Scalar>(c.tensors.at(name)).values;
  };
  start("initial_S", cache.S_values);
  start("initial_M", cache.M_values);

  Named<Scalar> out;
  momentum_delta::LayerSaved<Scalar> saved;
  const momentum_delta::LayerOptions<Scalar> options{.cache = &cache, .rule = rule};
  Array<Scalar>& y = out["y"] = unwritten<Scalar>(x.shape);
  momentum_delta::layer_forward(weights.layer(), hidden_view<In>(x), hidden_view<Out>(y), saved, options);
  const std::vector<Index> state_shape(cache.state_shape.begin(), cache.state_shape.end());
  out["final_S"] = {state_shape, cache.S_values};
  out["final_M"] = {state_shape, cache.M_values};
  if (!backward) return out;

  LayerInMemory<Scalar> dweights(c.config);
  dweights.memory = unwritten<Scalar>({Index(dweights.memory.size())}).values;
  const Array<Scalar> dy = cast<Scalar>(c.tensors.at("dy"));
  Array<Scalar>& dx = out["dx"] = unwritten<Scalar>(x.shape);
  momentum_delta::layer_backward(weights.layer(), hidden_view<In>(x), saved, hidden_view<In>(dy),
                                 {.dx = hidden_view<Out>(dx), .dweights = dweights.weights()}, options);
  momentum_delta::for_each_weight(
      c.config,
      [&](const char* name, const momentum_delta::WeightShape& shape, std::span<Scalar> values) {
        out[std::string("dweight.") + name] = {{shape.dimensions().begin(), shape.dimensions().end()},
                                               {values.begin(), values.end()}};
      },
      dweights.weights());
  return out;
}

}  // namespace examples
