/// \file
/// What a call takes and gives: Inputs, Outputs, Options. Logs are natural.
#pragma once

#include <algorithm>
#include <optional>

#include "momentum_delta/views.hpp"

namespace momentum_delta {

class Executor;   // executor.hpp
class Workspace;  // workspace.hpp

/// What forward(), backward() and step() read: B sequences of T tokens. q and k have HK heads, v and the
/// gates have HV, p has either; value head h reads query, key and (if it has HK heads) p head h / (HV / HK),
/// so HV is a positive multiple of HK.
///
/// Storage is the type of q, k, v, p, o and their gradients in memory: Scalar, or Eigen::bfloat16 or
/// Eigen::half with a Scalar of float. Everything is computed in Scalar, and rounded once to be stored, to
/// nearest even. Scalar is float, double, long double, or std::complex of one of them, for derivatives of
/// forward() by complex step.
///
/// The values of q, k, v, p and of states are not checked; the gates' are.
template <class Scalar, class Storage = Scalar>
struct Inputs {
  static_assert(detail::is_compute_scalar<Scalar>,
                "momentum_delta: Scalar must be float, double, long double, or std::complex of one of them");
  static_assert(
      detail::is_storage_of<Storage, Scalar>,
      "momentum_delta: Storage must be Scalar, or Eigen::bfloat16 or Eigen::half with Scalar = float");

  TokenView<const Storage> q{};  ///< [B, T, HK, K]
  TokenView<const Storage> k{};  ///< [B, T, HK, K]
  TokenView<const Storage> v{};  ///< [B, T, HV, V]
  TokenView<const Storage> p{};  ///< [B, T, HK or HV, K]; the vector that reads S, exactly as used; absent: k

  GateView<const Scalar> log_alpha{};  ///< [B, T, HV] in [-inf, 0]; absent: 0, no decay of S
  GateView<const Scalar> log_mu{};     ///< [B, T, HV] in [-inf, 0]; absent: -inf, no momentum
  GateView<const Scalar> beta{};       ///< [B, T, HV] finite; absent: 1
  GateView<const Scalar> eta{};        ///< [B, T, HV] finite; absent: 1

  StateView<const Scalar> initial_S{};  ///< [N, HV, K, V]; absent: 0
  StateView<const Scalar> initial_M{};  ///< [N, HV, K, V]; absent: 0

  /// Packed sequences: B is 1 and sequence n has the tokens [cu_seqlens[n], cu_seqlens[n + 1]). The offsets
  /// start at 0, never decrease and end at T; N is one less than their number. Viewed, as all else here.
  /// Empty: not packed, N = B.
  Offsets cu_seqlens{};

  std::optional<Scalar> scale{};  ///< factor of q, finite; absent: 1 / sqrt(K)
};

/// What forward() writes. Every element is assigned. No output may share memory with an input or with another
/// output, except that final_S may be exactly the view initial_S, and final_M exactly initial_M: the state is
/// then updated in place.
template <class Scalar, class Storage = Scalar>
struct Outputs {
  TokenView<Storage> o{};       ///< [B, T, HV, V]
  StateView<Scalar> final_S{};  ///< [N, HV, K, V]; absent: not wanted
  StateView<Scalar> final_M{};  ///< [N, HV, K, V]; absent: not wanted
};

/// Upstream gradients, of a loss by forward()'s outputs. Absent: 0.
template <class Scalar, class Storage = Scalar>
struct OutputGradients {
  TokenView<const Storage> do_{};      ///< [B, T, HV, V], by o; "do" is a keyword
  StateView<const Scalar> dfinal_S{};  ///< [N, HV, K, V], by final_S
  StateView<const Scalar> dfinal_M{};  ///< [N, HV, K, V], by final_M
};

/// Gradients of the loss by forward()'s inputs, natural logs for the gates; each has the shape of its input.
/// Absent: not wanted. dq, dk and dp of heads that a group shares are sums over the group. If p is absent, k
/// reads S too and dk is the gradient of both. An absent p or gate is a constant, and its gradient must be
/// absent.
/// Every element is assigned, or added to if `accumulate`. No gradient may share memory with anything else,
/// except that without `accumulate` dinitial_S may be exactly the view dfinal_S, and dinitial_M exactly
/// dfinal_M.
template <class Scalar, class Storage = Scalar>
struct InputGradients {
  TokenView<Storage> dq{};         ///< [B, T, HK, K]
  TokenView<Storage> dk{};         ///< [B, T, HK, K]
  TokenView<Storage> dv{};         ///< [B, T, HV, V]
  TokenView<Storage> dp{};         ///< [B, T, HK or HV, K]
  GateView<Scalar> dlog_alpha{};   ///< [B, T, HV]; exactly 0 where log_alpha is -inf
  GateView<Scalar> dlog_mu{};      ///< [B, T, HV]; exactly 0 where log_mu is -inf
  GateView<Scalar> dbeta{};        ///< [B, T, HV]
  GateView<Scalar> deta{};         ///< [B, T, HV]
  StateView<Scalar> dinitial_S{};  ///< [N, HV, K, V]
  StateView<Scalar> dinitial_M{};  ///< [N, HV, K, V]

  bool accumulate = false;  ///< add to what the gradients hold
};

/// The form in which a call computes a rule. All give the same values up to rounding.
enum class Algorithm {
  automatic,  ///< the faster form for the call: recurrent, but in backward() chunk
  recurrent,  ///< token by token, the definition
  chunk,  ///< chunk_size tokens at a time; equal to recurrent up to rounding (of what: see chunk/forward.hpp)
};

/// How a call computes the rule.
struct Options {
  Algorithm algorithm = Algorithm::automatic;  ///< the form; step() takes no chunk
  /// Tokens of a chunk, >= 1; a Saved keeps states at chunk boundaries, whatever the form; the recurrent form
  /// without a Saved has no use for it. Absent: 16, or 32 where K V >= 2^17; with a Saved 32, or 64 where
  /// K V >= 2^16. In backward() absent or that of `saved`; in step() absent.
  std::optional<Index> chunk_size{};
  bool allow_positive_log_gates = false;  ///< log_alpha and log_mu in [-inf, inf): the state may grow
  /// Who runs the heads; null: the calling thread. The results are the same bits.
  Executor* executor = nullptr;
  Workspace* workspace = nullptr;  ///< memory to use and keep; null: allocated for the call
};

namespace detail {

struct Sizes {
  Index B, T, HK, HV, K, V;
  Index N;        // states: batches, or packed sequences
  Index longest;  // tokens of the longest sequence
};

template <class Scalar, class Storage>
Sizes sizes_of(const Inputs<Scalar, Storage>& x) {
  const Index B = x.q.shape[0];
  Index longest = x.cu_seqlens.empty() ? x.q.shape[1] : 0;
  for (std::size_t n = 1; n < x.cu_seqlens.size(); ++n)
    longest = std::max(longest, x.cu_seqlens[n] - x.cu_seqlens[n - 1]);
  return {.B = B,
          .T = x.q.shape[1],
          .HK = x.q.shape[2],
          .HV = x.v.shape[2],
          .K = x.q.shape[3],
          .V = x.v.shape[3],
          .N = x.cu_seqlens.empty() ? B : Index(x.cu_seqlens.size()) - 1,
          .longest = longest};
}

// Where sequence n lies: tokens [begin, begin + count) of batch b.
struct SequenceTokens {
  Index b, begin, count;
};

template <class Scalar, class Storage>
SequenceTokens tokens_of(const Inputs<Scalar, Storage>& x, Index n) {
  if (x.cu_seqlens.empty()) return {n, 0, x.q.shape[1]};
  const Index begin = x.cu_seqlens[std::size_t(n)];
  return {0, begin, x.cu_seqlens[std::size_t(n) + 1] - begin};
}

}  // namespace detail
}  // namespace momentum_delta
