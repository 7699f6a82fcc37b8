/// \file
/// The MomentumDeltaNet layer: everything between a block's normalised input x and what is added to the
/// residual. For each token, with value heads h and the key head g = h / (num_v_heads / num_heads) of each:
///
///     q, k, v = SiLU(conv(W_q x)), SiLU(conv(W_k x)), SiLU(conv(W_v x))     causal, depthwise; conv optional
///     q_h = q_g - exp(D_log_h) k_g, k_h = k_g                                output correction, optional
///     q_h, k_h = q_h / |q_h|, k_h / |k_h|                                    normalize.hpp, epsilon 1e-6
///     log_alpha, log_mu, beta, eta = gates(W_a x, W_m x, W_b x, W_e x / tau) gates.hpp
///     o_h = rule(q_h, k_h, v_h, p_h = alpha_h k_h, gates)                    batch.hpp, scale 1 / sqrt(K)
///     y = W_o (norm(o) w act(W_g x))                                         RMS norm of each head's o
///
/// (fla, MomentumDeltaNet layer, whose weights it takes by name: layer/weights.hpp.)
/// layer_forward is the whole sequence (training, prefill), layer_step one token (decode), layer_backward the
/// gradients.
#pragma once

#include "momentum_delta/layer/pass.hpp"

namespace momentum_delta {

/// A configuration and its weights, in memory of the caller's. Weights must be finite. Results are the same
/// bits for any executor; where an array starts within a vector register may change the last bit.
template <class Scalar>
struct Layer {
  LayerConfig config;                  ///< sizes and choices; checked by every call
  LayerWeights<const Scalar> weights;  ///< all that config calls for, with their sizes
};

/// How a call computes the layer, and what it continues from.
template <class Scalar>
struct LayerOptions {
  /// Packed sequences, as in Inputs: B is 1. Neither state nor convolution passes from one to the next.
  Offsets cu_seqlens{};

  /// Where the sequences continue from, updated to where they end; N of it is B, or the number of packed
  /// sequences. Null: they begin, and their ends are not kept. For gradients it is a constant.
  LayerCache<Scalar>* cache = nullptr;

  /// Memory to use and keep, by calls that take no LayerSaved; null: allocated for the call.
  LayerSaved<Scalar>* scratch = nullptr;

  Options rule{};  ///< form and chunk size of the rule, its workspace, and the executor of the whole layer
};

/// What layer_backward writes. Assigned, or added to if `accumulate`. None may share memory with anything
/// else.
template <class Scalar>
struct LayerGradients {
  TokenView<Scalar> dx{};           ///< [B, T, 1, hidden]; absent: not wanted
  LayerWeights<Scalar> dweights{};  ///< of every weight that the configuration has; none may be absent
  bool accumulate = false;          ///< add to what the gradients hold
};

}  // namespace momentum_delta

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// Checks what every call takes, and says how it runs. `others` are the further views of its tokens.
template <class Scalar, class... Views>
LayerPass<Scalar> check_layer(const Check& check, const Layer<Scalar>& layer,
                              const TokenView<const Scalar>& x, std::span<const Index> cu_seqlens,
                              Executor* executor, const Views&... others) {
  const LayerConfig& c = layer.config;
  check_config(check, c);
  check_weights(check, c, layer.weights);
  if (x.absent()) check.fail("x is missing; its shape is [B, T, 1, hidden]");
  const Index B = x.shape[0], T = x.shape[1];
  check.countable("activations of [B, T, heads, head_dim or head_v_dim]",
                  std::array{B, T, c.value_heads(), std::max(c.head_dim, c.head_v_dim)});
  check.view("x", x, {B, T, 1, c.hidden_size}, "[B, T, 1, hidden]");
  if (!cu_seqlens.empty()) check.cu_seqlens(cu_seqlens, B, T);
  const auto together = [&](const auto& view) {
    return B * T == 0 || B == 1 || view.absent() || view.stride[0] == T * view.stride[1];
  };
  return {.config = c,
          .weights = layer.weights,
          .cu_seqlens = cu_seqlens,
          .executor = executor,
          .B = B,
          .T = T,
          .N = cu_seqlens.empty() ? B : Index(cu_seqlens.size()) - 1,
          .together = together(x) && (together(others) && ...)};
}

// The tokens and weights of a call, for aliases.
template <class Scalar>
void read_layer(Aliases& memory, const LayerConfig& c, const LayerWeights<const Scalar>& w,
                const TokenView<const Scalar>& x) {
  memory.reads("x", x);
  const auto read = [&](const char* name, const WeightShape& shape, std::span<const Scalar> weight) {
    memory.reads(name, StridedView<const Scalar, 1>(weight.data(), {shape.count()}));
  };
  for_each_weight(c, read, w);
}

template <class Scalar, class RunRule>
void layer_forward(const Check& check, const Layer<Scalar>& layer, const TokenView<const Scalar>& x,
                   const TokenView<Scalar>& y, LayerSaved<Scalar>& saved, const LayerOptions<Scalar>& options,
                   bool keep, const RunRule& run_rule) {
  const LayerConfig& c = layer.config;
  const LayerPass<Scalar> pass = check_layer(check, layer, x, options.cu_seqlens, options.rule.executor, y);
  check.view("y", y, x.shape, "[B, T, 1, hidden] of x");
  if (options.cache && !options.cache->fits(c, pass.N))
    check.fail("cache was made for another configuration or for other than ", pass.N, " sequences");
  if (c.use_output_correction)
    for (std::size_t h = 0; h < layer.weights.D_log.size(); ++h)
      if (!std::isfinite(std::exp(layer.weights.D_log[h])))
        check.fail("D_log[", h, "] = ", layer.weights.D_log[h], " has no finite exp");
  Aliases memory(check);
  read_layer(memory, c, layer.weights, x);
  if (LayerCache<Scalar>* const cache = options.cache) {
    const auto read = [&](const char* name, const std::vector<Scalar>& values) {
      memory.reads(name, StridedView<const Scalar, 1>(values.data(), {Index(values.size())}));
    };
    read("cache.S_values", cache->S_values);
    read("cache.M_values", cache->M_values);
    read("cache.q_tail", cache->q_tail);
    read("cache.k_tail", cache->k_tail);
    read("cache.v_tail", cache->v_tail);
  }
  memory.writes("y", y);

  pass.begin(saved);
  pass.forward(x, pass.values(saved), options.cache, run_rule, y);
  if (keep) pass.finish(saved);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// y = layer(x): x and y are [B, T, 1, hidden], as two matrices of T rows are (B = 1). Throws
/// std::invalid_argument, before y or the cache is written, if the configuration, a weight's size, a view or
/// an option does not fit, y shares memory with anything else, or a gate's projection is not finite, as from
/// an x that is not.
template <class Scalar>
void layer_forward(const Layer<Scalar>& layer, std::type_identity_t<TokenView<const Scalar>> x,
                   std::type_identity_t<TokenView<Scalar>> y,
                   const std::type_identity_t<LayerOptions<Scalar>>& options = {}) {
  LayerSaved<Scalar> own;
  const auto rule = [&](Inputs<Scalar> in, const TokenView<Scalar>& o) {
    if (!options.cache) return forward(in, {.o = o}, options.rule);
    in.initial_S = options.cache->S();
    in.initial_M = options.cache->M();
    forward(in, {o, options.cache->S(), options.cache->M()}, options.rule);
  };
  detail::layer_forward(detail::Check("layer_forward"), layer, x, y, options.scratch ? *options.scratch : own,
                        options, /*keep=*/false, rule);
}

/// The same, filling `saved` for layer_backward. options.scratch is not used.
template <class Scalar>
void layer_forward(const Layer<Scalar>& layer, std::type_identity_t<TokenView<const Scalar>> x,
                   std::type_identity_t<TokenView<Scalar>> y, LayerSaved<Scalar>& saved,
                   const std::type_identity_t<LayerOptions<Scalar>>& options = {}) {
  const auto rule = [&](Inputs<Scalar> in, const TokenView<Scalar>& o) {
    Saved<Scalar>& states = detail::LayerPass<Scalar>::rule(saved);
    if (!options.cache) return forward(in, {.o = o}, states, options.rule);
    in.initial_S = options.cache->S();
    in.initial_M = options.cache->M();
    forward(in, {o, options.cache->S(), options.cache->M()}, states, options.rule);
  };
  detail::layer_forward(detail::Check("layer_forward"), layer, x, y, saved, options, /*keep=*/true, rule);
}

/// One token of each sequence: x and y are [B, 1, 1, hidden], and `cache` is updated. Up to rounding what
/// layer_forward gives for that token of the whole sequence. Throws as layer_forward does, and if x has not
/// exactly one token, or if options ask for the chunk form, a chunk size, packed
/// sequences or another cache.
template <class Scalar>
void layer_step(const Layer<Scalar>& layer, std::type_identity_t<TokenView<const Scalar>> x,
                std::type_identity_t<TokenView<Scalar>> y, LayerCache<Scalar>& cache,
                std::type_identity_t<LayerOptions<Scalar>> options = {}) {
  const detail::Check check("layer_step");
  if (x.absent()) check.fail("x is missing; its shape is [B, 1, 1, hidden]");
  if (x.shape[1] != 1) check.fail("x has T = ", x.shape[1], " tokens, not 1");
  if (!options.cu_seqlens.empty()) check.fail("cu_seqlens must be absent: every sequence has one token");
  if (options.cache) check.fail("options.cache must be null: the state is cache");
  options.cache = &cache;
  LayerSaved<Scalar> own;
  const auto rule = [&](const Inputs<Scalar>& in, const TokenView<Scalar>& o) {
    step(in, cache.S(), cache.M(), o, options.rule);
  };
  detail::layer_forward(check, layer, x, y, options.scratch ? *options.scratch : own, options, /*keep=*/false,
                        rule);
}

/// Gradients of a loss by x and all weights, from dy [B, T, 1, hidden], that by y. x, weights, cu_seqlens and
/// chunk size must be those of layer_forward(layer, x, y, saved); options.rule.algorithm is as for
/// backward(). The cache is not looked at: the state that the sequences continued from is in `saved`, and
/// counts as a constant, as does the loss's dependence on the state at the end. Throws std::invalid_argument
/// as layer_forward does, before a gradient is written, and if `saved` was not filled by such a forward pass.
template <class Scalar>
void layer_backward(const Layer<Scalar>& layer, std::type_identity_t<TokenView<const Scalar>> x,
                    LayerSaved<Scalar>& saved, std::type_identity_t<TokenView<const Scalar>> dy,
                    const std::type_identity_t<LayerGradients<Scalar>>& dx,
                    const std::type_identity_t<LayerOptions<Scalar>>& options = {}) {
  const detail::Check check("layer_backward");
  const LayerConfig& c = layer.config;
  const detail::LayerPass<Scalar> pass =
      detail::check_layer(check, layer, x, options.cu_seqlens, options.rule.executor, dy, dx.dx);
  check.view("dy", dy, x.shape, "[B, T, 1, hidden] of x");
  if (!dx.dx.absent()) check.view("dx", dx.dx, x.shape, "[B, T, 1, hidden] of x");
  detail::check_weights(check, c, dx.dweights, "d");
  pass.check_saved(check, saved, options.rule);
  detail::Aliases memory(check);
  detail::read_layer(memory, c, layer.weights, x);
  memory.reads("dy", dy);
  memory.writes("dx", dx.dx);
  std::vector<std::string> names;  // that `memory` refers to
  names.reserve(32);
  const auto write = [&](const std::string& name, const WeightShape& shape, std::span<Scalar> weight) {
    memory.writes(names.emplace_back("d" + name).c_str(),
                  StridedView<Scalar, 1>(weight.data(), {shape.count()}));
  };
  for_each_weight(c, write, dx.dweights);

  const auto rule = [&](const Inputs<Scalar>& in, const OutputGradients<Scalar>& d_out,
                        const InputGradients<Scalar>& d_in) {
    backward(in, pass.rule(saved), d_out, d_in, options.rule);
  };
  pass.backward(x, pass.values(saved), dy, pass.gradients(saved), rule, dx.dx, dx.dweights, dx.accumulate);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
