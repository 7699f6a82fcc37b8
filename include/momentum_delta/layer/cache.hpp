/// \file
/// What decoding carries from token to token.
#pragma once

#include <vector>

#include "momentum_delta/layer/weights.hpp"

namespace momentum_delta {

/// Of N sequences: the state S and M of the rule, and the last conv_size - 1 projections that each
/// convolution saw, before its SiLU. New, it is the state before the first token: all 0. It is a value: a
/// copy continues on its own.
template <class Scalar>
struct LayerCache {
  /// The state before the first token. Throws std::invalid_argument if the configuration is unusable or
  /// sequences < 0.
  explicit LayerCache(const LayerConfig& config, Index sequences = 1) {
    const detail::Check check("LayerCache");
    detail::check_config(check, config);
    if (sequences < 0) check.fail("sequences = ", sequences, " is negative");
    check.countable("states of [N, HV, K, V]",
                    std::array{sequences, config.value_heads(), config.head_dim, config.head_v_dim});
    const Sizes sizes(config, sequences);
    state_shape = sizes.state_shape;
    S_values.resize(sizes.state);
    M_values.resize(sizes.state);
    q_tail.resize(sizes.key_tail);
    k_tail.resize(sizes.key_tail);
    v_tail.resize(sizes.value_tail);
  }

  /// Is it of such a configuration and so many sequences?
  bool fits(const LayerConfig& config, Index sequences) const {
    const Sizes sizes(config, sequences);
    return state_shape == sizes.state_shape && S_values.size() == sizes.state &&
           M_values.size() == sizes.state && q_tail.size() == sizes.key_tail &&
           k_tail.size() == sizes.key_tail && v_tail.size() == sizes.value_tail;
  }

  StateView<Scalar> S() { return {S_values.data(), state_shape}; }  ///< [N, HV, K, V]
  StateView<Scalar> M() { return {M_values.data(), state_shape}; }  ///< [N, HV, K, V]

  std::array<Index, 4> state_shape;  ///< N, HV, K, V
  std::vector<Scalar> S_values,      ///< S, of that shape, contiguous
      M_values;                      ///< M, of that shape, contiguous
  std::vector<Scalar> q_tail,        ///< [N, conv_size - 1, key_dim], oldest first; empty without convolution
      k_tail,                        ///< the same
      v_tail;                        ///< [N, conv_size - 1, value_dim], oldest first

 private:
  struct Sizes {
    std::array<Index, 4> state_shape;
    std::size_t state, key_tail, value_tail;

    Sizes(const LayerConfig& c, Index N)
        : state_shape{N, c.value_heads(), c.head_dim, c.head_v_dim},
          state(std::size_t(N * c.value_dim() * c.head_dim)),
          key_tail(std::size_t(N * c.tail_rows() * c.key_dim())),
          value_tail(std::size_t(N * c.tail_rows() * c.value_dim())) {}
  };
};

}  // namespace momentum_delta
