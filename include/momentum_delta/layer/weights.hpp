/// \file
/// The MomentumDeltaNet layer's configuration, and its weights by name.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>

#include "momentum_delta/gates.hpp"

namespace momentum_delta {

/// What gates the normalised output: g = W_g x enters as sigmoid(g), or as swish(g) = g sigmoid(g).
enum class OutputGate {
  sigmoid,  ///< 1 / (1 + exp(-g))
  swish     ///< g / (1 + exp(-g))
};

/// Sizes and choices of a MomentumDeltaNet layer. hidden_size, num_heads, head_dim and head_v_dim must be
/// set.
struct LayerConfig {
  Index hidden_size = 0;  ///< of x and y
  Index num_heads = 0;    ///< query and key heads
  Index num_v_heads = 0;  ///< a multiple of num_heads; 0: num_heads. Value head h reads key head
                          ///< h / (num_v_heads / num_heads)
  Index head_dim = 0;     ///< K
  Index head_v_dim = 0;   ///< V

  bool use_short_conv = true;             ///< convolve q, k and v before their SiLU
  Index conv_size = 4;                    ///< tokens that a convolution sees, >= 1
  bool use_output_correction = true;      ///< subtract exp(D_log) k from q
  OutputGate gate = OutputGate::sigmoid;  ///< act(g) of the output
  double tau_factor = 1;   ///< eta's projection is divided by sqrt(hidden_size / tau_factor); > 0
  double norm_eps = 1e-5;  ///< of the output's RMS norm, > 0
  GateOptions gates{};     ///< min_log_mu and allow_neg_eigval

  /// HV.
  Index value_heads() const { return num_v_heads == 0 ? num_heads : num_v_heads; }
  /// Channels of all query or key heads, HK K.
  Index key_dim() const { return num_heads * head_dim; }
  /// Channels of all value heads, HV V.
  Index value_dim() const { return value_heads() * head_v_dim; }
  /// Earlier tokens that a convolution sees.
  Index tail_rows() const { return use_short_conv ? conv_size - 1 : 0; }
};

/// Weights, or their gradients: row-major, contiguous, in the caller's memory; with Scalar const for weights
/// that are read. The names and shapes are those of the public layer (fla, MomentumDeltaNet), whose
/// checkpoints fit: see for_each_weight.
template <class Scalar>
struct LayerWeights {
  std::span<Scalar> q_proj{},  ///< [key_dim, hidden]
      k_proj{},                ///< [key_dim, hidden]
      v_proj{},                ///< [value_dim, hidden]
      g_proj{},                ///< [value_dim, hidden], of the output's gate
      o_proj{},                ///< [hidden, value_dim]
      o_norm{};                ///< [V], shared by all heads
  std::span<Scalar> a_proj{},  ///< [HV, hidden], of log_alpha
      b_proj{},                ///< [HV, hidden], of beta
      m_proj{},                ///< [HV, hidden], of log_mu
      e_proj{};                ///< [HV, hidden], of eta
  std::span<Scalar> A_log{},   ///< [HV]; this and the next four: see GateParameters
      Mu_log{},                ///< [HV]
      log_factor{},            ///< [HV]
      dt_bias{},               ///< [HV]
      mu_bias{},               ///< [HV]
      D_log{};  ///< [HV], natural log of the output correction's factor, exp finite; if there is one
  std::span<Scalar>
      q_conv1d{},  ///< [key_dim, 1, conv_size], the token's own factor last; if there are convolutions
      k_conv1d{},  ///< [key_dim, 1, conv_size], as q_conv1d
      v_conv1d{};  ///< [value_dim, 1, conv_size], as q_conv1d

  /// No weights.
  LayerWeights() = default;
  /// All of them one after the other, in the order of for_each_weight: parameter_count(config) numbers.
  /// Throws std::invalid_argument if the configuration is unusable.
  LayerWeights(const LayerConfig& config, Scalar* memory);
  /// The same weights, to be read.
  template <detail::MutableOf<Scalar> Mutable>
  LayerWeights(const LayerWeights<Mutable>& other);
};

/// The sizes of one weight; those that it does not have are 1.
struct WeightShape {
  std::array<Index, 3> sizes{1, 1, 1};  ///< rank of them, then 1
  std::size_t rank = 0;                 ///< 1 to 3

  /// At most 3 sizes.
  WeightShape(std::initializer_list<Index> list) : rank(list.size()) {
    std::copy(list.begin(), list.end(), sizes.begin());
  }
  /// Elements.
  Index count() const { return sizes[0] * sizes[1] * sizes[2]; }
  /// The sizes that it has; they lie in this object.
  std::span<const Index> dimensions() const { return {sizes.data(), rank}; }
};

namespace detail {

inline void check_config(const Check& check, const LayerConfig& c) {
  const auto positive = [&](const char* name, auto value) {
    if (!(value > 0) || !(value <= std::numeric_limits<decltype(value)>::max()))
      check.fail("config.", name, " = ", value, " is not > 0 and finite");
  };
  positive("hidden_size", c.hidden_size);
  positive("num_heads", c.num_heads);
  positive("head_dim", c.head_dim);
  positive("head_v_dim", c.head_v_dim);
  positive("conv_size", c.conv_size);
  positive("tau_factor", c.tau_factor);
  positive("norm_eps", c.norm_eps);
  if (c.num_v_heads < 0 || c.value_heads() % c.num_heads != 0)
    check.fail("config.num_v_heads = ", c.num_v_heads, " is no multiple of config.num_heads = ", c.num_heads);
  const Index HV = c.value_heads(),
              largest = std::max({c.hidden_size, c.conv_size, c.head_dim, c.head_v_dim});
  check.countable("config: [heads, head_dim, the largest size]", std::array{HV, c.head_dim, largest});
  check.countable("config: [heads, head_v_dim, the largest size]", std::array{HV, c.head_v_dim, largest});
}

}  // namespace detail

/// visit(name, shape, spans...) for every weight that the configuration has, of any number of LayerWeights at
/// once.
template <class Visit, class... Weights>
void for_each_weight(const LayerConfig& c, const Visit& visit, Weights&&... w) {
  const Index HV = c.value_heads(), hidden = c.hidden_size;
  visit("q_proj.weight", WeightShape{c.key_dim(), hidden}, w.q_proj...);
  visit("k_proj.weight", WeightShape{c.key_dim(), hidden}, w.k_proj...);
  visit("v_proj.weight", WeightShape{c.value_dim(), hidden}, w.v_proj...);
  visit("g_proj.weight", WeightShape{c.value_dim(), hidden}, w.g_proj...);
  visit("o_proj.weight", WeightShape{hidden, c.value_dim()}, w.o_proj...);
  visit("o_norm.weight", WeightShape{c.head_v_dim}, w.o_norm...);
  visit("a_proj.weight", WeightShape{HV, hidden}, w.a_proj...);
  visit("b_proj.weight", WeightShape{HV, hidden}, w.b_proj...);
  visit("m_proj.weight", WeightShape{HV, hidden}, w.m_proj...);
  visit("e_proj.weight", WeightShape{HV, hidden}, w.e_proj...);
  visit("A_log", WeightShape{HV}, w.A_log...);
  visit("Mu_log", WeightShape{HV}, w.Mu_log...);
  visit("log_factor", WeightShape{HV}, w.log_factor...);
  visit("dt_bias", WeightShape{HV}, w.dt_bias...);
  visit("mu_bias", WeightShape{HV}, w.mu_bias...);
  if (c.use_output_correction) visit("D_log", WeightShape{HV}, w.D_log...);
  if (c.use_short_conv) {
    visit("q_conv1d.weight", WeightShape{c.key_dim(), 1, c.conv_size}, w.q_conv1d...);
    visit("k_conv1d.weight", WeightShape{c.key_dim(), 1, c.conv_size}, w.k_conv1d...);
    visit("v_conv1d.weight", WeightShape{c.value_dim(), 1, c.conv_size}, w.v_conv1d...);
  }
}

/// Numbers in all weights of the configuration. Throws std::invalid_argument if it is unusable.
inline Index parameter_count(const LayerConfig& config) {
  detail::check_config(detail::Check("parameter_count"), config);
  Index count = 0;
  for_each_weight(config, [&](const char*, const WeightShape& shape) { count += shape.count(); });
  return count;
}

template <class Scalar>
LayerWeights<Scalar>::LayerWeights(const LayerConfig& config, Scalar* memory) {
  detail::check_config(detail::Check("LayerWeights"), config);
  const auto place = [&](const char*, const WeightShape& shape, std::span<Scalar>& w) {
    w = {memory, std::size_t(shape.count())};
    memory += shape.count();
  };
  for_each_weight(config, place, *this);
}

template <class Scalar>
template <detail::MutableOf<Scalar> Mutable>
LayerWeights<Scalar>::LayerWeights(const LayerWeights<Mutable>& x)
    : q_proj(x.q_proj),
      k_proj(x.k_proj),
      v_proj(x.v_proj),
      g_proj(x.g_proj),
      o_proj(x.o_proj),
      o_norm(x.o_norm),
      a_proj(x.a_proj),
      b_proj(x.b_proj),
      m_proj(x.m_proj),
      e_proj(x.e_proj),
      A_log(x.A_log),
      Mu_log(x.Mu_log),
      log_factor(x.log_factor),
      dt_bias(x.dt_bias),
      mu_bias(x.mu_bias),
      D_log(x.D_log),
      q_conv1d(x.q_conv1d),
      k_conv1d(x.k_conv1d),
      v_conv1d(x.v_conv1d) {}

namespace detail {

template <class Scalar>
GateParameters<Scalar> gate_parameters(const LayerWeights<Scalar>& w) {
  return {w.A_log, w.dt_bias, w.Mu_log, w.mu_bias, w.log_factor};
}

template <class Scalar>
void check_weights(const Check& check, const LayerConfig& c, const LayerWeights<Scalar>& w,
                   const char* of = "") {
  const auto sized = [&](const char* name, const WeightShape& shape, std::span<Scalar> weight) {
    if (Index(weight.size()) != shape.count())
      check.fail(of, name, " has ", weight.size(), " elements, not the ", shape.count(),
                 " that config calls for");
  };
  for_each_weight(c, sized, w);
}

}  // namespace detail

/// Assigns every weight from a checkpoint. find(name) gives a pointer to something with `shape`, a range of
/// sizes, and as<Scalar>(), a range of the values row-major, or null where there is none. `prefix` is put
/// before each name (as "model.layers.0.attn."). Throws std::invalid_argument, before anything is assigned,
/// that names every weight of the checkpoint that is missing or misshaped, or if the configuration is
/// unusable or a span of `weights` does not fit it.
template <class Scalar, class Find>
void load_weights(const LayerConfig& config, const LayerWeights<Scalar>& weights, const Find& find,
                  const std::string& prefix = "") {
  const detail::Check check("load_weights");
  detail::check_config(check, config);
  detail::check_weights(check, config, weights);
  std::string problems;
  const auto text = [](const auto& sizes) {
    std::string out = "[";
    for (const auto size : sizes) out += (out.size() > 1 ? ", " : "") + std::to_string(size);
    return out + "]";
  };
  for_each_weight(config, [&](const char* name, const WeightShape& shape) {
    const auto* tensor = find(prefix + name);
    const auto wanted = shape.dimensions();
    if (!tensor)
      problems += "\n  " + prefix + name + " " + text(wanted) + " is missing";
    else if (!std::equal(wanted.begin(), wanted.end(), tensor->shape.begin(), tensor->shape.end()))
      problems += "\n  " + prefix + name + " has shape " + text(tensor->shape) + ", not " + text(wanted);
  });
  if (!problems.empty()) check.fail("the checkpoint does not fit:", problems);
  const auto assign = [&](const char* name, const WeightShape&, std::span<Scalar> w) {
    const auto values = find(prefix + name)->template as<Scalar>();
    std::copy(values.begin(), values.end(), w.begin());
  };
  for_each_weight(config, assign, weights);
}

/// The published initialisation: exp(A_log) and exp(Mu_log) ~ U(0, 16), exp(log_factor) ~ U(0, 4),
/// exp(D_log) ~ U(0, 1); dt_bias = mu_bias = softplus_inverse(dt) with dt log-uniform in [1e-3, 0.1], at
/// least 1e-4; o_norm 1; projections and convolutions ~ U(-1, 1) / sqrt(fan in), as torch.nn initialises
/// them. uniform() gives the next random number in [0, 1).
/// Throws std::invalid_argument if the configuration is unusable or a weight's size does not fit it.
template <class Scalar, class Uniform>
void initialize_weights(const LayerConfig& config, const LayerWeights<Scalar>& weights, Uniform&& uniform) {
  const detail::Check check("initialize_weights");
  detail::check_config(check, config);
  detail::check_weights(check, config, weights);
  const auto fill = [&](const char*, const WeightShape& shape, std::span<Scalar> w) {
    if (shape.rank == 1) return;
    const double bound = 1 / std::sqrt(double(shape.count() / shape.sizes[0]));
    for (Scalar& x : w) x = Scalar(bound * (2 * double(uniform()) - 1));
  };
  for_each_weight(config, fill, weights);
  const auto log_uniform_to = [&](std::span<Scalar> w, double high) {
    for (Scalar& x : w) x = Scalar(std::log(high * (1 - double(uniform()))));  // 1 - u is never 0
  };
  std::fill(weights.o_norm.begin(), weights.o_norm.end(), Scalar(1));
  log_uniform_to(weights.A_log, 16);
  log_uniform_to(weights.Mu_log, 16);
  log_uniform_to(weights.log_factor, 4);
  log_uniform_to(weights.D_log, 1);
  for (std::size_t h = 0; h < weights.dt_bias.size(); ++h) {
    const double dt = std::exp(std::log(1e-3) + double(uniform()) * (std::log(0.1) - std::log(1e-3)));
    weights.dt_bias[h] = weights.mu_bias[h] = Scalar(softplus_inverse(std::max(dt, 1e-4)));
  }
}

}  // namespace momentum_delta
