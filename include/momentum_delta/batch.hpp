/// \file
/// The public calls: forward() and backward() over whole sequences, step() for one token of decoding.
#pragma once

#include "momentum_delta/check.hpp"
#include "momentum_delta/chunk/backward.hpp"
#include "momentum_delta/chunk/forward.hpp"
#include "momentum_delta/executor.hpp"
#include "momentum_delta/recurrent/backward.hpp"
#include "momentum_delta/recurrent/forward.hpp"
#include "momentum_delta/recurrent/fused.hpp"
#include "momentum_delta/recurrent/step.hpp"
#include "momentum_delta/saved.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// The faster form and chunk size for a shape, as bench/README.md measures them. Forward, the (fused)
// recurrence is the faster form at every shape and type; backward, the chunk form. Small chunks have less
// work inside them, large ones fewer passes over the state, and in training fewer states to keep.
enum class Purpose { forward, training };

inline Index choose_chunk_size(const Options& options, const Sizes& s, Purpose purpose) {
  const Index size =
      purpose == Purpose::forward ? (s.K * s.V < 256 * 512 ? 16 : 32) : (s.K * s.V < 256 * 256 ? 32 : 64);
  return std::clamp<Index>(options.chunk_size.value_or(size), 1, std::max<Index>(s.longest, 1));
}

inline Algorithm choose_algorithm(const Options& options) {
  return options.algorithm == Algorithm::automatic ? Algorithm::recurrent : options.algorithm;
}

// visit(kernel, i) for each 0 <= i < count through the options' executor, each worker with a kernel of its
// own in its share of the workspace. make(arena) constructs a kernel, and says with an empty arena what
// memory that takes.
template <class Make, class Visit>
void for_each_task(const Options& options, Index count, const Make& make, const Visit& visit) {
  SerialExecutor serial;
  Executor& executor = options.executor ? *options.executor : serial;
  Workspace own;
  Arena need;
  (void)make(need);
  const Scratch scratch(options.workspace ? *options.workspace : own, executor.threads(), need.used());
  const auto task = [&](Index i, int worker) {
    Arena arena = scratch.arena(worker);
    auto kernel = make(arena);
    visit(kernel, i);
  };
  executor.run(count, task);
}

// How many tasks the columns of each head are cut into: one where the heads alone keep the threads evenly
// busy, else enough for about four tasks a thread. Columns do not depend on each other, so the cut changes no
// bit.
template <class Scalar>
Index columns_per_task(const Options& options, Index heads, Index V) {
  const Index threads = options.executor ? options.executor->threads() : 1;
  const Index panels = (V + panel_width<Scalar> - 1) / panel_width<Scalar>;
  if (heads == 0 || panels == 0 || heads % threads == 0) return V;
  const Index parts = std::clamp<Index>((4 * threads + heads - 1) / heads, 1, panels);
  return std::min(V, (panels + parts - 1) / parts * panel_width<Scalar>);
}

// visit(kernel, n, h, begin, end) for the columns [begin, end) of value head h of sequence n, all of them
// once. make(arena, columns) constructs a kernel with room for so many.
template <class Scalar, class Make, class Visit>
void for_each_columns(const Options& options, const Sizes& s, const Make& make, const Visit& visit) {
  const Index columns = columns_per_task<Scalar>(options, s.N * s.HV, s.V);
  const Index parts = columns == 0 ? 1 : (s.V + columns - 1) / columns;
  for_each_task(
      options, s.N * s.HV * parts, [&](Arena& arena) { return make(arena, columns); },
      [&](auto& kernel, Index i) {
        const Index head = i / parts, begin = i % parts * columns;
        visit(kernel, head / s.HV, head % s.HV, begin, std::min(s.V, begin + columns));
      });
}

// make(arena, sizes, columns). saved: null, or what keeps the states.
template <class Scalar, class Storage, class Make>
void forward_with(const Inputs<Scalar, Storage>& x, const Outputs<Scalar, Storage>& y, const Options& options,
                  std::type_identity_t<Saved<Scalar>>* saved, const Make& make) {
  const Sizes s = sizes_of(x);
  for_each_columns<Scalar>(
      options, s, [&](Arena& arena, Index columns) { return make(arena, s, columns); },
      [&](auto& kernel, Index n, Index h, Index begin, Index end) {
        const SequenceTokens tokens = tokens_of(x, n);
        kernel(head_of(x, tokens, h), begin, end,
               {state_rows(x.initial_S, n, h), state_rows(x.initial_M, n, h)},
               y.o.rows(tokens.b, h, tokens.begin, tokens.count),
               {state_rows(y.final_S, n, h), state_rows(y.final_M, n, h)}, {saved, n, h, tokens});
      });
}

template <class Scalar, class Storage>
void forward(const Inputs<Scalar, Storage>& x, const Outputs<Scalar, Storage>& y, const Options& options,
             Purpose purpose, Saved<Scalar>* saved) {
  const auto run = [&](const auto& make) { forward_with(x, y, options, saved, make); };
  if (choose_algorithm(options) == Algorithm::chunk)
    run([&](Arena& arena, const Sizes& s, Index columns) {
      return ChunkForward<Scalar, Storage>(arena, s, columns, choose_chunk_size(options, s, purpose));
    });
  else if constexpr (std::is_floating_point_v<Scalar>)
    run([](Arena& arena, const Sizes& s, Index columns) {
      return FusedForward<Scalar, Storage>(arena, s, columns);
    });
  else
    run([](Arena& arena, const Sizes& s, Index columns) {
      return RecurrentForward<Scalar, Storage>(arena, s, columns);
    });
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// Computes y.o, and y.final_S, y.final_M if wanted, from x: see sequence.hpp for shapes and ranges, and
/// recurrent/forward.hpp for the definition. Both algorithms give the same values up to rounding
/// (of what: see chunk/forward.hpp).
///
/// Throws std::invalid_argument, before anything is written, if a shape, stride, offset, gate, scale or
/// option is out of its range, a tensor that may not be absent is (q, k, v, o), or an output shares memory
/// with anything else.
template <class Scalar, class Storage>
void forward(const Inputs<Scalar, Storage>& x, const std::type_identity_t<Outputs<Scalar, Storage>>& y,
             const Options& options = {}) {
  detail::check_forward(detail::Check("forward"), x, y, options);
  detail::forward<Scalar, Storage>(x, y, options, detail::Purpose::forward, nullptr);
}

/// The chunk form with a chunk size fixed in the caller's code, >= 1: forward<64>(x, y), the same kernel.
/// Also throws if options ask for another algorithm or another size.
template <int ChunkSize, class Scalar, class Storage>
void forward(const Inputs<Scalar, Storage>& x, const std::type_identity_t<Outputs<Scalar, Storage>>& y,
             Options options = {}) {
  static_assert(ChunkSize >= 1, "momentum_delta::forward: ChunkSize must be >= 1");
  const detail::Check check("forward");
  if (options.algorithm == Algorithm::recurrent)
    check.fail("options.algorithm is recurrent, which has no chunk size, but ChunkSize = ", ChunkSize);
  if (options.chunk_size.value_or(ChunkSize) != ChunkSize)
    check.fail("options.chunk_size = ", *options.chunk_size, " is not ChunkSize = ", ChunkSize);
  options.algorithm = Algorithm::chunk;
  options.chunk_size = ChunkSize;
  forward(x, y, options);
}

/// forward(x, y, options) that also fills `saved` for backward(). The same bits, unless the chunk form is
/// asked for without a chunk size, which is then chosen for training. Throws as forward(x, y, options) does.
template <class Scalar, class Storage>
void forward(const Inputs<Scalar, Storage>& x, const std::type_identity_t<Outputs<Scalar, Storage>>& y,
             Saved<Scalar>& saved, const Options& options = {}) {
  const detail::Check check("forward");
  detail::check_forward(check, x, y, options);
  constexpr auto purpose = detail::Purpose::training;
  const detail::Sizes s = detail::sizes_of(x);
  const Index chunk_size = detail::choose_chunk_size(options, s, purpose);
  check.countable("saved states of [chunks, HV, K, V]",
                  std::array{s.N + s.B * s.T / chunk_size, s.HV, s.K, s.V});
  detail::Record<Scalar>::begin(saved, x, chunk_size);
  detail::forward(x, y, options, purpose, &saved);
  detail::Record<Scalar>::finish(saved);
}

/// Gradients dx of a loss by the inputs x, from dy, those by the outputs of forward(x, y, saved): see
/// sequence.hpp for shapes, and for what is assigned and what is added. x must hold the values that forward()
/// saw. The chunk size is the one that `saved` was made with.
/// Algorithm: chunk and automatic are the chunk form (chunk/backward.hpp), whatever form the forward pass
/// had; recurrent is the definition's own gradient (recurrent/backward.hpp), the same up to rounding and
/// slower. With positive log gates the chunk form has the limit that chunk/forward.hpp names under Rounding.
/// Throws std::invalid_argument as forward() does, before anything is written, and if `saved` was not filled
/// by a forward pass of these shapes and options.chunk_size, if set, or if a gradient of an absent p or gate
/// is asked for.
template <class Scalar, class Storage>
void backward(const Inputs<Scalar, Storage>& x, const Saved<Scalar>& saved,
              const std::type_identity_t<OutputGradients<Scalar, Storage>>& dy,
              const std::type_identity_t<InputGradients<Scalar, Storage>>& dx, const Options& options = {}) {
  using namespace detail;
  const Check check("backward");
  check_backward(check, x, dy, dx, options);
  Recorded<Scalar>::check(check, saved, x);
  const Sizes s = sizes_of(x);
  if (options.chunk_size && choose_chunk_size(options, s, Purpose::training) != saved.chunk_size())
    check.fail("options.chunk_size = ", *options.chunk_size, ", but saved was made with ",
               saved.chunk_size());
  if (options.algorithm != Algorithm::recurrent) check_chunk(check, s, saved.chunk_size());
  check.countable("gradients of [T, K or V]", std::array{s.longest, std::max(s.K, s.V)});

  // A task is a group of value heads that share a query and key, whose gradients are sums over the group.
  const Index group = s.HK == 0 ? 0 : s.HV / s.HK;
  const Index interval = Recorded<Scalar>::interval(saved);
  const Index stretch = std::min(saved.chunk_size() * interval, s.longest);
  const auto run = [&](const auto& make_kernel) {
    const auto make = [&](Arena& arena) {
      return std::pair(make_kernel(arena), GroupGradients<Scalar, Storage>(arena, s, stretch));
    };
    for_each_task(options, s.N * s.HK, make, [&](auto& kernel_and_sums, Index i) {
      auto& [kernel, sums] = kernel_and_sums;
      const Index n = i / s.HK, first = i % s.HK * group;
      const SequenceTokens tokens = tokens_of(x, n);
      for (Index m = 0; m < group; ++m)
        kernel.begin(m, {state_rows(dy.dfinal_S, n, first + m), state_rows(dy.dfinal_M, n, first + m)});
      for (Index c = Recorded<Scalar>{saved, n, first, tokens}.checkpoints(); c-- > 0;) {
        for (Index m = 0; m < group; ++m) {
          const Index h = first + m;
          const Recorded<Scalar> recorded{saved, n, h, tokens};
          const Index begin = recorded.begin(c);
          kernel(m, head_of(x, tokens, h), recorded, c, sums.head(x, dy, dx, tokens, h, begin));
          sums.finish(dx, tokens, h, s.HV, begin, recorded.end(c));
        }
      }
      for (Index m = 0; m < group; ++m)
        kernel.end(m, {state_rows(dx.dinitial_S, n, first + m), state_rows(dx.dinitial_M, n, first + m)},
                   dx.accumulate);
    });
  };
  if (options.algorithm == Algorithm::recurrent)
    run([&](Arena& arena) { return RecurrentBackward<Scalar, Storage>(arena, s, stretch); });
  else
    run([&](Arena& arena) { return ChunkBackward<Scalar, Storage>(arena, s, saved.chunk_size(), interval); });
}

/// One token (T = 1) of B sequences: S and M, [B, HV, K, V], are updated in place and o, [B, 1, HV, V], is
/// assigned. Throws std::invalid_argument as forward() does, and if x has not exactly one token, or has an
/// initial state or cu_seqlens (the state is S and M), or if options ask for the chunk form
/// or set a chunk size.
template <class Scalar, class Storage>
void step(const Inputs<Scalar, Storage>& x, std::type_identity_t<StateView<Scalar>> S,
          std::type_identity_t<StateView<Scalar>> M, std::type_identity_t<TokenView<Storage>> o,
          const Options& options = {}) {
  using namespace detail;
  check_step(Check("step"), x, S, M, o, options);
  const Sizes s = sizes_of(x);
  for_each_columns<Scalar>(
      options, s, [&](Arena& arena, Index) { return Step<Scalar, Storage>(arena, s); },
      [&](auto& kernel, Index b, Index h, Index begin, Index end) {
        kernel(head_of(x, {b, 0, 1}, h), begin, end, state_rows(S, b, h), state_rows(M, b, h),
               o.rows(b, h, 0, 1));
      });
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
