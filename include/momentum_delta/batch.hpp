// The public calls: forward() and backward() over whole sequences, step() for one token of decoding.
#pragma once

#include "momentum_delta/check.hpp"
#include "momentum_delta/chunk/backward.hpp"
#include "momentum_delta/chunk/forward.hpp"
#include "momentum_delta/recurrent/backward.hpp"
#include "momentum_delta/recurrent/forward.hpp"
#include "momentum_delta/recurrent/fused.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta {
namespace detail {

// What bench/momentum_delta_bench shows for K x V from 64 x 64 to 256 x 512, float and double: the (fused)
// recurrence is the faster forward form at every shape, and chunks of 32 are within a tenth of the fastest.
inline Index choose_chunk_size(const Options& options, const Sizes& s) {
  return std::clamp<Index>(options.chunk_size.value_or(32), 1, std::max<Index>(s.longest, 1));
}

inline Algorithm choose_algorithm(const Options& options) {
  return options.algorithm == Algorithm::automatic ? Algorithm::recurrent : options.algorithm;
}

// visit(n, h, tokens, S, M) for every sequence and value head. S, M: K x V of its own, holding first_S and
// first_M (zero if absent) before the call; afterwards last_S and last_M are put(S), put(M) where they are
// wanted.
template <class Scalar, class Put, class Visit>
void for_each_head(const Inputs<Scalar>& x, const StateView<const Scalar>& first_S,
                   const StateView<const Scalar>& first_M, const StateView<Scalar>& last_S,
                   const StateView<Scalar>& last_M, const Put& put, const Visit& visit) {
  const Sizes s = sizes_of(x);
  Matrix<Scalar> S(s.K, s.V), M(s.K, s.V);
  for (Index n = 0; n < s.N; ++n) {
    for (Index h = 0; h < s.HV; ++h) {
      if (first_S.absent())
        S.setZero();
      else
        S = first_S.matrix(n, h);
      if (first_M.absent())
        M.setZero();
      else
        M = first_M.matrix(n, h);
      visit(n, h, tokens_of(x, n), S, M);
      if (!last_S.absent()) put(last_S.matrix(n, h), S);
      if (!last_M.absent()) put(last_M.matrix(n, h), M);
    }
  }
}

// make_record(n, h, tokens): see saved.hpp.
template <int ChunkSize, class Scalar, class MakeRecord>
void forward(const Inputs<Scalar>& x, const Outputs<Scalar>& y, const Options& options,
             const MakeRecord& make_record) {
  const Sizes s = sizes_of(x);
  const auto run = [&](auto&& kernel) {
    const auto assign = [](auto&& to, const auto& from) { to = from; };
    for_each_head(x, x.initial_S, x.initial_M, y.final_S, y.final_M, assign,
                  [&](Index n, Index h, const SequenceTokens& tokens, Matrix<Scalar>& S, Matrix<Scalar>& M) {
                    kernel(head_of(x, tokens, h), S, M, y.o.rows(tokens.b, h, tokens.begin, tokens.count),
                           make_record(n, h, tokens));
                  });
  };
  if (choose_algorithm(options) == Algorithm::recurrent) {
    if constexpr (std::is_floating_point_v<Scalar>)
      run(FusedForward<Scalar>(s.K));
    else
      run(RecurrentForward<Scalar>(s.K, s.V));
  } else {
    run(ChunkForward<Scalar, ChunkSize>(choose_chunk_size(options, s), s.K, s.V));
  }
}

}  // namespace detail

// Computes y.o, and y.final_S, y.final_M if wanted, from x: see sequence.hpp for shapes and ranges, and
// recurrent/forward.hpp for the definition. Both algorithms give the same values up to rounding
// (of what: see chunk/forward.hpp).
// Throws std::invalid_argument, before anything is written, if a shape, offset, gate or option is out of its
// range or an output shares memory with anything else.
template <class Scalar>
void forward(const Inputs<Scalar>& x, const Outputs<Scalar>& y, const Options& options = {}) {
  detail::check_forward(detail::Check("forward"), x, y, options);
  detail::forward<Eigen::Dynamic>(x, y, options, [](auto&&...) { return detail::NoRecord{}; });
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
  detail::check_forward(check, x, y, options);
  detail::forward<ChunkSize>(x, y, options, [](auto&&...) { return detail::NoRecord{}; });
}

// forward(x, y, options), the same bits, that also fills `saved` for backward().
template <class Scalar>
void forward(const Inputs<Scalar>& x, const Outputs<Scalar>& y, Saved<Scalar>& saved,
             const Options& options = {}) {
  detail::check_forward(detail::Check("forward"), x, y, options);
  detail::Record<Scalar>::begin(saved, x, detail::choose_chunk_size(options, detail::sizes_of(x)));
  detail::forward<Eigen::Dynamic>(x, y, options, [&](Index n, Index h, const detail::SequenceTokens& tokens) {
    return detail::Record<Scalar>{saved, n, h, tokens};
  });
  detail::Record<Scalar>::finish(saved);
}

// Gradients dx of a loss by the inputs x, from dy, those by the outputs of forward(x, y, saved): see
// sequence.hpp for shapes, and for what is assigned and what is added. x must hold the values that forward()
// saw. The chunk size is the one that `saved` was made with.
// Algorithm: chunk and automatic are the chunk form (chunk/backward.hpp), whatever form the forward pass had;
// recurrent is the definition's own gradient (recurrent/backward.hpp), the same up to rounding and slower.
// With positive log gates the chunk form has the limit that chunk/forward.hpp names under Rounding. Throws
// std::invalid_argument as forward() does, before anything is written, and if `saved` was not filled by a
// forward pass of these shapes and options.chunk_size, if set, or if a gradient of an absent p or gate is
// asked for.
template <class Scalar>
void backward(const Inputs<Scalar>& x, const Saved<Scalar>& saved, const OutputGradients<Scalar>& dy,
              const InputGradients<Scalar>& dx, const Options& options = {}) {
  const detail::Check check("backward");
  detail::check_backward(check, x, dy, dx, options);
  detail::Recorded<Scalar>::check(check, saved, x);
  const detail::Sizes s = detail::sizes_of(x);
  if (options.chunk_size && detail::choose_chunk_size(options, s) != saved.chunk_size())
    check.fail("options.chunk_size = ", *options.chunk_size, ", but saved was made with ",
               saved.chunk_size());

  const auto run = [&](auto&& kernel) {
    const auto put = [&](auto&& to, const auto& from) {
      if (dx.accumulate)
        to += from;
      else
        to = from;
    };
    detail::for_each_head(x, dy.dfinal_S, dy.dfinal_M, dx.dinitial_S, dx.dinitial_M, put,
                          [&](Index n, Index h, const detail::SequenceTokens& tokens, auto& dS, auto& dM) {
                            kernel(detail::head_of(x, tokens, h),
                                   detail::Recorded<Scalar>{saved, n, h, tokens},
                                   detail::gradients_of(x, dy, dx, tokens, h), dS, dM);
                          });
  };
  if (options.algorithm == Algorithm::recurrent)
    run(detail::RecurrentBackward<Scalar>(s));
  else
    run(detail::ChunkBackward<Scalar>(saved.chunk_size(), detail::Recorded<Scalar>::interval(saved), s));
}

// One token (T = 1) of B sequences: S and M, [B, HV, K, V], are updated in place and o, [B, 1, HV, V], is
// assigned. Throws std::invalid_argument as forward() does, and if x has not exactly one token, or has an
// initial state or cu_seqlens (the state is S and M), or if options ask for the chunk form.
template <class Scalar>
void step(const Inputs<Scalar>& x, std::type_identity_t<StateView<Scalar>> S,
          std::type_identity_t<StateView<Scalar>> M, std::type_identity_t<TokenView<Scalar>> o,
          const Options& options = {}) {
  detail::check_step(detail::Check("step"), x, S, M, o, options);
  const detail::Sizes s = detail::sizes_of(x);
  detail::RecurrentForward<Scalar> kernel(s.K, s.V);
  for (Index b = 0; b < s.B; ++b) {
    for (Index h = 0; h < s.HV; ++h) {
      kernel(detail::head_of(x, {b, 0, 1}, h), S.matrix(b, h), M.matrix(b, h), o.rows(b, h, 0, 1),
             detail::NoRecord{});
    }
  }
}

}  // namespace momentum_delta
