/// \file
/// The values between x and y of one pass through the layer.
#pragma once

#include "momentum_delta/layer/cache.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta {

namespace detail {

// For each of n = B T tokens, in the order in which they are computed; the backward pass has another one of
// these for the gradients.
template <class Scalar>
struct LayerRows {
  LayerRows(Arena& arena, const LayerConfig& c, Index B_, Index T_, Index N_)
      : B(B_), T(T_), N(N_), HK(c.num_heads), HV(c.value_heads()), K(c.head_dim), V(c.head_v_dim) {
    const auto tokens = [&](Index width) { return arena.take<Scalar>(B * T * width); };
    const auto tails = [&](Index width) { return arena.take<Scalar>(N * c.tail_rows() * width); };
    q_in = tokens(HK * K), k_in = tokens(HK * K), v_in = tokens(HV * V);
    a = tokens(HV), b = tokens(HV), m = tokens(HV), e = tokens(HV);
    g = tokens(HV * V);
    q_tail = tails(HK * K), k_tail = tails(HK * K), v_tail = tails(HV * V);
    q_conv = q_in, k_conv = k_in, v_conv = v_in;
    if (c.use_short_conv) q_conv = tokens(HK * K), k_conv = tokens(HK * K), v_conv = tokens(HV * V);
    q_act = tokens(HK * K), k_act = tokens(HK * K), v = tokens(HV * V);
    q_each = tokens(HV * K), k_each = tokens(HV * K);
    q = tokens(HV * K), k = tokens(HV * K), p = tokens(HV * K);
    log_alpha = tokens(HV), log_mu = tokens(HV), beta = tokens(HV), eta = tokens(HV);
    o = tokens(HV * V), normed = tokens(HV * V);
  }

  Index B, T, N, HK, HV, K, V;
  Scalar *q_in, *k_in, *v_in;        // [n, HK K], [n, HK K], [n, HV V]  projections
  Scalar *a, *b, *m, *e, *g;         // [n, HV] each and [n, HV V]       projections, e over tau
  Scalar *q_tail, *k_tail, *v_tail;  // [N, W - 1, ..]                   q_in, .. before the first token
  Scalar *q_conv, *k_conv, *v_conv;  // as q_in, ..                      after the convolution, if any
  Scalar *q_act, *k_act, *v;         // as q_in, ..                      after SiLU
  Scalar *q_each, *k_each;           // [n, HV, K]                       for each value head, q corrected
  Scalar *q, *k, *p;                 // [n, HV, K]                       of unit length, and alpha k
  Scalar *log_alpha, *log_mu, *beta, *eta;  // [n, HV]
  Scalar *o, *normed;  // [n, HV, V]                       of the rule, after the gated norm

  Index n() const { return B * T; }
  RowsMap<Scalar> rows(Scalar* x, Index width) const { return {x, n(), width, Eigen::OuterStride<>(width)}; }
  GateView<Scalar> gate(Scalar* x) const { return {x, {B, T, HV}}; }
  TokenView<Scalar> tokens(Scalar* x, Index H, Index D) const { return {x, {B, T, H, D}}; }
  // One head of a [n, H, D]: n x D, and the same as a view.
  RowsMap<Scalar> head(Scalar* x, Index H, Index D, Index h) const {
    return {from(x, h * D), n(), D, Eigen::OuterStride<>(H * D)};
  }
  TokenView<Scalar> head_tokens(Scalar* x, Index h) const {
    return {from(x, h * K), {1, n(), 1, K}, {n() * HV * K, HV * K, K, 1}};
  }
  GateView<Scalar> head_gate(Scalar* x, Index h) const {
    return {from(x, h), {1, n(), 1}, {n() * HV, HV, 1}};
  }

 private:
  // Without tokens there may be no memory to step over.
  Scalar* from(Scalar* x, Index offset) const { return n() == 0 ? x : x + offset; }
};

inline namespace MOMENTUM_DELTA_TARGET {
template <class Scalar>
struct LayerPass;
}  // namespace MOMENTUM_DELTA_TARGET

}  // namespace detail

/// Filled by layer_forward(layer, x, y, saved) and read by layer_backward, which must see the same x, weights
/// and cu_seqlens. It holds every value between x and y, and a Saved of the rule (saved.hpp says what
/// checkpoint_interval and keep_u are), and room for the gradients of those values, which layer_backward
/// allocates and overwrites. It can be used again, for any shape, and keeps its memory for that.
template <class Scalar>
class LayerSaved {
 public:
  /// As Saved(checkpoint_interval, keep_u), of the rule. Throws std::invalid_argument if checkpoint_interval
  /// < 1.
  explicit LayerSaved(Index checkpoint_interval = 1, bool keep_u = false)
      : rule_(checkpoint_interval, keep_u) {}

 private:
  friend struct detail::LayerPass<Scalar>;

  Saved<Scalar> rule_;
  detail::Memory values_, gradients_;
  bool filled_ = false;           // by a pass that layer_backward can follow
  std::array<Index, 3> sizes_{};  // B, T, N
  Index parameters_ = 0;          // of its layer
};

}  // namespace momentum_delta
