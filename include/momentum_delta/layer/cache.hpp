// What decoding carries from token to token.
#pragma once

#include "momentum_delta/layer/weights.hpp"

namespace momentum_delta {

// Of N sequences: the state S and M of the rule, and the last conv_size - 1 projections that each convolution
// saw, before its SiLU. New, it is the state before the first token: all 0. It is a value: a copy continues
// on its own.
template <class Scalar>
struct LayerCache {
  // Throws std::invalid_argument if the configuration is unusable or sequences < 0.
  explicit LayerCache(const LayerConfig& config, Index sequences = 1) : N(sequences) {
    const detail::Check check("LayerCache");
    detail::check_config(check, config);
    if (N < 0) check.fail("sequences = ", N, " is negative");
    state_shape = {N, config.value_heads(), config.head_dim, config.head_v_dim};
    tail_rows = config.use_short_conv ? config.conv_size - 1 : 0;
    for (auto* state : {&S_values, &M_values})
      state->resize(std::size_t(N * config.value_heads() * config.head_dim * config.head_v_dim));
    for (auto* tail : {&q_tail, &k_tail}) tail->resize(std::size_t(N * tail_rows * config.key_dim()));
    v_tail.resize(std::size_t(N * tail_rows * config.value_dim()));
  }

  StateView<Scalar> S() { return {S_values.data(), state_shape}; }  // [N, HV, K, V]
  StateView<Scalar> M() { return {M_values.data(), state_shape}; }  // [N, HV, K, V]

  Index N, tail_rows;
  std::array<Index, 4> state_shape;
  std::vector<Scalar> S_values, M_values;
  std::vector<Scalar> q_tail, k_tail, v_tail;  // [N, conv_size - 1, key_dim or value_dim], oldest first
};

}  // namespace momentum_delta
