// The public calls: forward() over whole sequences, step() for one token of decoding.
#pragma once

#include "momentum_delta/check.hpp"
#include "momentum_delta/chunk/forward.hpp"
#include "momentum_delta/recurrent/forward.hpp"

namespace momentum_delta {
namespace detail {

// Both choices are the fastest of bench/momentum_delta_bench, float and double, K x V from 64 x 64 to 256 x
// 512: chunks of 32 beat 16, 64 and 128, and the chunk form beats the recurrence where the state is larger
// than 128 x 128.
inline Index choose_chunk_size(const Options& options, const Sizes& s) {
  return std::clamp<Index>(options.chunk_size.value_or(32), 1, std::max<Index>(s.T, 1));
}

inline Algorithm choose_algorithm(const Options& options, const Sizes& s) {
  if (options.algorithm != Algorithm::automatic) return options.algorithm;
  return s.T >= 16 && s.K * s.V > 128 * 128 ? Algorithm::chunk : Algorithm::recurrent;
}

// kernel(head, S, M, o) for every sequence and value head, with S, M in memory of their own.
template <class Scalar, class Kernel>
void for_each_head(const Inputs<Scalar>& x, const Outputs<Scalar>& y, Kernel&& kernel) {
  const Sizes s = sizes_of(x);
  const bool packed = !x.cu_seqlens.empty();
  Matrix<Scalar> S(s.K, s.V), M(s.K, s.V);
  for (Index n = 0; n < s.N; ++n) {
    const Index b = packed ? 0 : n;
    const Index begin = packed ? x.cu_seqlens[std::size_t(n)] : 0;
    const Index end = packed ? x.cu_seqlens[std::size_t(n) + 1] : s.T;
    for (Index h = 0; h < s.HV; ++h) {
      if (x.initial_S.absent())
        S.setZero();
      else
        S = x.initial_S.matrix(n, h);
      if (x.initial_M.absent())
        M.setZero();
      else
        M = x.initial_M.matrix(n, h);
      kernel(head_of(x, b, h, begin, end - begin), S, M, y.o.rows(b, h, begin, end - begin));
      if (!y.final_S.absent()) y.final_S.matrix(n, h) = S;
      if (!y.final_M.absent()) y.final_M.matrix(n, h) = M;
    }
  }
}

template <int ChunkSize, class Scalar>
void forward(const Inputs<Scalar>& x, const Outputs<Scalar>& y, const Options& options) {
  check_forward(Check("forward"), x, y, options);
  const Sizes s = sizes_of(x);
  if (choose_algorithm(options, s) == Algorithm::recurrent) {
    for_each_head(x, y, RecurrentForward<Scalar>(s.K, s.V));
  } else {
    for_each_head(x, y, ChunkForward<Scalar, ChunkSize>(choose_chunk_size(options, s), s.K, s.V));
  }
}

}  // namespace detail

// Computes y.o, and y.final_S, y.final_M if wanted, from x: see sequence.hpp for shapes and ranges, and
// recurrent/forward.hpp for the definition. Both algorithms give the same values up to rounding.
// Throws std::invalid_argument, before anything is written, if a shape, offset, gate or option is out of its
// range or an output shares memory with anything else.
template <class Scalar>
void forward(const Inputs<Scalar>& x, const Outputs<Scalar>& y, const Options& options = {}) {
  detail::forward<Eigen::Dynamic>(x, y, options);
}

// The chunk form with a chunk size known at compile time, >= 1: forward<64>(x, y). Also throws if options ask
// for another algorithm or another size.
template <int ChunkSize, class Scalar>
void forward(const Inputs<Scalar>& x, const Outputs<Scalar>& y, Options options = {}) {
  static_assert(ChunkSize >= 1, "momentum_delta::forward: ChunkSize must be >= 1");
  const detail::Check check("forward");
  if (options.algorithm == Algorithm::recurrent)
    check.fail("options.algorithm is recurrent, which has no chunk size, but ChunkSize = ", ChunkSize);
  if (options.chunk_size.value_or(ChunkSize) != ChunkSize)
    check.fail("options.chunk_size = ", *options.chunk_size, " is not ChunkSize = ", ChunkSize);
  options.algorithm = Algorithm::chunk;
  options.chunk_size = ChunkSize;
  detail::forward<ChunkSize>(x, y, options);
}

// One token (T = 1) of B sequences: S and M, [B, HV, K, V], are updated in place and o, [B, 1, HV, V], is
// assigned. Throws std::invalid_argument as forward() does, and if x has not exactly one token, or has an
// initial state or cu_seqlens (the state is S and M), or if options ask for the chunk form.
template <class Scalar>
void step(const Inputs<Scalar>& x, std::type_identity_t<StateView<Scalar>> S,
          std::type_identity_t<StateView<Scalar>> M, std::type_identity_t<TokenView<Scalar>> o,
          const Options& options = {}) {
  const detail::Check check("step", "S", "M");
  if (x.q.shape[1] != 1) check.fail("q has T = ", x.q.shape[1], " tokens, not 1");
  if (!x.initial_S.absent()) check.fail("initial_S must be absent: the state is S");
  if (!x.initial_M.absent()) check.fail("initial_M must be absent: the state is M");
  if (!x.cu_seqlens.empty()) check.fail("cu_seqlens must be absent: every sequence has one token");
  if (options.algorithm == Algorithm::chunk)
    check.fail("options.algorithm is chunk, but one token is no chunk");
  if (options.chunk_size) check.fail("options.chunk_size is set, but one token is no chunk");
  if (S.absent()) check.fail("S is missing; its shape is [B, HV, K, V]");
  if (M.absent()) check.fail("M is missing; its shape is [B, HV, K, V]");
  detail::check_forward(check, x, Outputs<Scalar>{o, S, M}, options);
  const detail::Sizes s = detail::sizes_of(x);
  detail::RecurrentForward<Scalar> kernel(s.K, s.V);
  for (Index b = 0; b < s.B; ++b) {
    for (Index h = 0; h < s.HV; ++h) {
      kernel(detail::head_of(x, b, h, 0, 1), S.matrix(b, h), M.matrix(b, h), o.rows(b, h, 0, 1));
    }
  }
}

}  // namespace momentum_delta
