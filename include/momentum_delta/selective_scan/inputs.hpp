/// \file
/// What a call of the selective scan takes and gives.
#pragma once

#include <optional>

#include "momentum_delta/sequence.hpp"
#include "momentum_delta/views.hpp"

namespace momentum_delta {

/// Mamba's selective state space (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State
/// Spaces", section 3 and algorithm 2). For each channel d of D, which has N states of its own, with t the
/// token and everything but B and C per channel:
///
///     dt_t  = softplus(delta_t + delta_bias)     or delta_t + delta_bias, if not delta_softplus
///     h_t,n = exp(dt_t A_n) h_{t-1},n + dt_t B_t,n u_t
///     y_t   = sum_n C_t,n h_t,n + D u_t
///     out_t = y_t silu(z_t)                      or y_t, if z is absent
///
/// The channels are G equal groups, each with one B and C: channel d reads those of group d / (D / G).
///
/// Storage is the type of u, delta, B, C, z, out and their gradients in memory: Scalar, or Eigen::bfloat16 or
/// Eigen::half with a Scalar of float. Everything is computed in Scalar, and rounded once to be stored, to
/// nearest even. Scalar is float, double, long double, or, but for scan_backward(), std::complex of one of
/// them.
///
/// The values of u, B, C, D, z and of states are not checked.
template <class Scalar, class Storage = Scalar>
struct ScanInputs {
  static_assert(detail::is_compute_scalar<Scalar>,
                "momentum_delta: Scalar must be float, double, long double, or std::complex of one of them");
  static_assert(
      detail::is_storage_of<Storage, Scalar>,
      "momentum_delta: Storage must be Scalar, or Eigen::bfloat16 or Eigen::half with Scalar = float");

  ArrayView<const Storage, 3> u{};      ///< [B, T, D]
  ArrayView<const Storage, 3> delta{};  ///< [B, T, D] finite; a step length before bias and softplus
  ArrayView<const Scalar, 2> A{};       ///< [D, N] in [-inf, 0]; -inf counts as finite: see decay_mask.hpp
  TokenView<const Storage> B{};         ///< [B, T, G, N]; G divides D
  TokenView<const Storage> C{};         ///< [B, T, G, N]

  ArrayView<const Scalar, 1> D{};              ///< [D]; absent: 0
  ArrayView<const Storage, 3> z{};             ///< [B, T, D]; absent: out is y
  ArrayView<const Scalar, 1> delta_bias{};     ///< [D] finite; absent: 0
  ArrayView<const Scalar, 3> initial_state{};  ///< [B, D, N]; absent: 0

  bool delta_softplus = true;  ///< if not, delta + delta_bias is dt, which must be >= 0
};

/// What scan_forward() writes. Every element is assigned. No output may share memory with an input or with
/// the other output, except that final_state may be exactly the view initial_state.
template <class Scalar, class Storage = Scalar>
struct ScanOutputs {
  ArrayView<Storage, 3> out{};         ///< [B, T, D]
  ArrayView<Scalar, 3> final_state{};  ///< [B, D, N]; absent: not wanted
};

/// Upstream gradients, of a loss by scan_forward()'s outputs. Absent: 0.
template <class Scalar, class Storage = Scalar>
struct ScanOutputGradients {
  ArrayView<const Storage, 3> dout{};         ///< [B, T, D], by out
  ArrayView<const Scalar, 3> dfinal_state{};  ///< [B, D, N], by final_state
};

/// Gradients of the loss by scan_forward()'s inputs; each has the shape of its input. Absent: not wanted. The
/// gradient of an absent D, z or delta_bias must be absent.
/// Every element is assigned, or added to if `accumulate`. No gradient may share memory with anything else,
/// except that without `accumulate` dinitial_state may be exactly the view dfinal_state.
template <class Scalar, class Storage = Scalar>
struct ScanInputGradients {
  ArrayView<Storage, 3> du{};             ///< [B, T, D]
  ArrayView<Storage, 3> ddelta{};         ///< [B, T, D]
  ArrayView<Scalar, 2> dA{};              ///< [D, N]; 0 where A is -inf
  TokenView<Storage> dB{};                ///< [B, T, G, N], sums over the channels of a group
  TokenView<Storage> dC{};                ///< [B, T, G, N], sums over the channels of a group
  ArrayView<Scalar, 1> dD{};              ///< [D]
  ArrayView<Storage, 3> dz{};             ///< [B, T, D]
  ArrayView<Scalar, 1> ddelta_bias{};     ///< [D]
  ArrayView<Scalar, 3> dinitial_state{};  ///< [B, D, N]

  bool accumulate = false;  ///< add to what the gradients hold
};

/// How a call computes the selective scan.
struct ScanOptions {
  Algorithm algorithm = Algorithm::automatic;  ///< automatic: recurrent. scan_step() takes no chunk
  /// Tokens of a chunk, >= 1; a ScanSaved keeps states at chunk boundaries, whatever the form. Absent: 64. In
  /// scan_backward() absent or that of `saved`; in scan_step() absent.
  std::optional<Index> chunk_size{};
  Executor* executor = nullptr;    ///< who runs the panels of channels; null: the calling thread. The results
                                   ///< are the same bits
  Workspace* workspace = nullptr;  ///< memory to use and keep; null: allocated for the call
};

namespace detail {

struct ScanSizes {
  Index B, T, D, G, N;

  friend bool operator==(const ScanSizes&, const ScanSizes&) = default;
};

template <class Scalar, class Storage>
ScanSizes sizes_of(const ScanInputs<Scalar, Storage>& x) {
  return {x.u.shape[0], x.u.shape[1], x.u.shape[2], x.B.shape[2], x.A.shape[1]};
}

}  // namespace detail
}  // namespace momentum_delta
