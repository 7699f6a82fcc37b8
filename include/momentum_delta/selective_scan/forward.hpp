/// \file
/// The selective scan forward (inputs.hpp has the definition), a panel of channels at a time. In each block
/// of tokens a few states stay in registers while the tokens pass:
///
///     h_n  = decay(dt_t, rate_n) h_n + x_t B_t,n          x_t = dt_t u_t
///     y_t += C_t,n h_n
///
/// so that no state is written to memory per token.
///
/// The chunk form makes chunks independent of each other, for machines with more threads than panels. With
/// s_tj = dt_{j+1} + .. + dt_t, the segment sum, and tokens 1 .. c of a chunk,
///
///     h_c,n = exp(s_c0 A_n) h_0,n + sum_j exp(s_cj A_n) x_j B_j,n
///
/// is, but for h_0, known of every chunk at once; a sweep over the chunks adds what h_0 contributes; and from
/// the state before it each chunk then computes its outputs by the recurrence. It has two exponentials a
/// state and token where the recurrence has one.
#pragma once

#include "momentum_delta/selective_scan/saved.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar, class Storage>
class ScanForward {
 public:
  // Room for `panels` panels at once.
  ScanForward(Arena& arena, const ScanSizes& s, Index panels)
      : tokens_(arena, s, panels, block),
        h_(arena.take<Scalar>(panels * state_size())),
        y_(take_rows<Scalar>(arena, block)),
        z_(take_rows<Scalar>(arena, block)),
        sigmoid_(take_rows<Scalar>(arena, block)) {}

  ScanTokens<Scalar, Storage>& tokens() { return tokens_; }
  Scalar* state(Index p) { return h_ + p * state_size(); }  // of an open panel, Np x W
  Index state_size() const { return tokens_.Np() * W; }

  // Tokens [begin, end) of all open panels, from state() to state(). A block of tokens passes one panel after
  // the other: their rows share cache lines and pages.
  void run(Index begin, Index end, const ArrayView<Storage, 3>& out) {
    const RowsMap<Storage> outs = tokens_.sequence(out);
    for (Index t0 = begin; t0 < end; t0 += block) {
      const Index n = std::min(block, end - t0);
      tokens_.load_states(t0, n);
      for (Index p = 0; p < tokens_.count(); ++p) {
        tokens_.select(p);
        tokens_.load(t0, n);
        tokens_.skip(n, y_);
        const bool last = p + 1 == tokens_.count();
        const FetchRows<Storage> next = last ? rows_of(0, t0 + n, block, outs) : rows_of(p + 1, t0, n, outs);
        for (Index s = 0; s < tokens_.Np(); s += states_together) scan(n, s, state(p), next);
        put(t0, n, outs);
      }
    }
  }

  // What the tokens [begin, end) leave in the state after them, to state(0); returns the sum of their dt.
  Row<Scalar> contribution(Index begin, Index end) {
    std::fill_n(h_, state_size(), Scalar(0));
    Row<Scalar> sum = Row<Scalar>::Zero();
    for (Index rest = end; rest > begin;) {
      const Index n = std::min(block, rest - begin);
      rest -= n;
      tokens_.load_states(rest, n);
      tokens_.load(rest, n);
      sum = sums_to_end<Scalar>(n, tokens_.dt(), sum);
      for (Index s = 0; s < tokens_.Np(); s += states_together) collect(n, s);
    }
    return sum;
  }

 private:
  static constexpr int W = panel_width<Scalar>;
  static constexpr Index block = 32;  // tokens

  // What passes a panel for the tokens [t0, t0 + n), as far as there are so many.
  FetchRows<Storage> rows_of(Index p, Index t0, Index n, const RowsMap<Storage>& outs) const {
    const ScanInputs<Scalar, Storage>& x = tokens_.inputs();
    const Channels c = tokens_.channels(p);
    FetchRows<Storage> rows;
    rows.add(outs, t0, n, c.first, c.width);
    if (tokens_.has_z()) rows.add(tokens_.sequence(x.z), t0, n, c.first, c.width);
    rows.add(tokens_.sequence(x.u), t0, n, c.first, c.width);
    rows.add(tokens_.sequence(x.delta), t0, n, c.first, c.width);
    return rows;
  }

  // States [s, s + states_together) of h over the block.
  EIGEN_DONT_INLINE void scan(Index n, Index s, Scalar* hs, const FetchRows<Storage>& next) {
    const Index stride = tokens_.stride();
    const Index part = s / states_together, parts = tokens_.Np() / states_together;
    const int begin = next.begin(part, parts), end = next.begin(part + 1, parts);
    const Scalar *dt = tokens_.dt(), *x = tokens_.x(), *B = tokens_.B() + s, *C = tokens_.C() + s;
    Scalar* const ys = y_;
    Row<Scalar> rate[states_together], h[states_together];
    unroll<states_together>([&](auto j) MOMENTUM_DELTA_INLINE {
      rate[j] = aligned_row(tokens_.rate() + (s + j) * W);
      h[j] = aligned_row(hs + (s + j) * W);
    });
    for (Index i = 0; i < n; ++i) {
      const Row<Scalar> dt_i = aligned_row(dt + i * W), x_i = aligned_row(x + i * W);
      Row<Scalar> y = aligned_row(ys + i * W);
      next.row(i, begin, end);
      unroll<states_together>([&](auto j) MOMENTUM_DELTA_INLINE {
        h[j] = multiply_add<Scalar>(decay_row<Scalar>(dt_i, rate[j]), h[j], x_i * B[i * stride + j]);
        y += h[j] * C[i * stride + j];
      });
      aligned_row(ys + i * W) = y;
    }
    unroll<states_together>([&](auto j) MOMENTUM_DELTA_INLINE { aligned_row(hs + (s + j) * W) = h[j]; });
  }

  // out of the block, from y.
  void put(Index t0, Index n, const RowsMap<Storage>& outs) {
    const Channels c = tokens_.channels();
    Scalar *const y = y_, *const z = z_, *const sigmoid = sigmoid_;
    if (tokens_.has_z()) {
      load_rows(tokens_.sequence(tokens_.inputs().z), t0, n, c.first, c.width, n, z);
      sigmoid_rows(n, z, sigmoid);
      for (Index i = 0; i < n; ++i)
        aligned_row(y + i * W) *= aligned_row(z + i * W) * aligned_row(sigmoid + i * W);
    }
    put_rows(y, outs, t0, n, c);
  }

  // The same states of the chunk's end; dt holds the segment sums.
  EIGEN_DONT_INLINE void collect(Index n, Index s) {
    const Index stride = tokens_.stride();
    const Scalar *sums = tokens_.dt(), *x = tokens_.x(), *B = tokens_.B() + s;
    Row<Scalar> rate[states_together], h[states_together];
    unroll<states_together>([&](auto j) MOMENTUM_DELTA_INLINE {
      rate[j] = aligned_row(tokens_.rate() + (s + j) * W);
      h[j] = aligned_row(h_ + (s + j) * W);
    });
    for (Index i = n; i-- > 0;) {
      const Row<Scalar> sum = aligned_row(sums + i * W), x_i = aligned_row(x + i * W);
      unroll<states_together>([&](auto j) MOMENTUM_DELTA_INLINE {
        h[j] += decay_row<Scalar>(sum, rate[j]) * (x_i * B[i * stride + j]);
      });
    }
    unroll<states_together>([&](auto j) MOMENTUM_DELTA_INLINE { aligned_row(h_ + (s + j) * W) = h[j]; });
  }

  ScanTokens<Scalar, Storage> tokens_;
  Scalar* h_;                  // Np x W for each panel
  Scalar *y_, *z_, *sigmoid_;  // block x W
};

// A forward pass, from the inputs to out and final_state. record: where the states before chunks are kept,
// data null if they are not.
template <class Scalar, class Storage>
void scan_recurrent(const ScanInputs<Scalar, Storage>& x, const ScanOutputs<Scalar, Storage>& y,
                    const ScanOptions& options, Index chunk_size, const ChunkStates<Scalar>& record) {
  const ScanSizes s = sizes_of(x);
  const ScanPanels<Scalar> panels(s);
  const ScanStrips<Scalar> strips(s);
  const Index stretch = record.data ? chunk_size : std::max<Index>(s.T, 1);
  run_scan(
      options, [](Arena&) { return 0; },
      [&](Arena& arena) { return ScanForward<Scalar, Storage>(arena, s, strips.together()); },
      [&](int, const auto& run) {
        run(strips.count(), [&](ScanForward<Scalar, Storage>& kernel, Index task) {
          const Strip strip = strips[task];
          kernel.tokens().open(x, strip.b, strip.first, strip.count);
          const auto each = [&](const auto& visit) {
            for (Index p = 0; p < strip.count; ++p) visit(kernel.state(p), strip.first + p);
          };
          each([&](Scalar* state, Index panel) {
            read_states(x.initial_state, strip.b, panels[panel], s.N, state);
          });
          for (Index t = 0; t < s.T; t += stretch) {
            if (record.data)
              each([&](const Scalar* state, Index panel) {
                std::copy_n(state, record.size, record.at(strip.b * panels.count() + panel, t / stretch));
              });
            kernel.run(t, std::min(s.T, t + stretch), y.out);
          }
          if (!y.final_state.empty())
            each([&](const Scalar* state, Index panel) {
              write_states(state, panels[panel], s.N, [&](Index d) { return y.final_state.row(strip.b, d); });
            });
        });
      });
}

template <class Scalar, class Storage>
void scan_chunks(const ScanInputs<Scalar, Storage>& x, const ScanOutputs<Scalar, Storage>& y,
                 const ScanOptions& options, Index chunk_size, ChunkStates<Scalar> states) {
  constexpr Index W = panel_width<Scalar>;
  const ScanSizes s = sizes_of(x);
  const ScanPanels<Scalar> panels(s);
  const Index tasks = s.B * panels.count(), chunks = chunks_of(s.T, chunk_size);
  struct Shared {
    Scalar *states, *sums;
  };
  using Kernel = ScanForward<Scalar, Storage>;
  run_scan(
      options,
      [&](Arena& arena) {
        return Shared{
            states.data ? states.data : arena.take<Scalar>(ChunkStates<Scalar>::count(s, chunk_size)),
            arena.take<Scalar>(tasks * chunks * W)};
      },
      [&](Arena& arena) { return Kernel(arena, s, 1); },
      [&](const Shared& shared, const auto& run) {
        states = {shared.states, chunks, padded_states(s.N) * W};
        const auto open = [&](Kernel& kernel, Index task) {
          kernel.tokens().open(x, task / panels.count(), task % panels.count(), 1);
        };
        run(tasks * chunks, [&](Kernel& kernel, Index i) {
          const Index task = i / chunks, c = i % chunks, begin = c * chunk_size;
          if (c == 0)
            read_states(x.initial_state, task / panels.count(), panels[task % panels.count()], s.N,
                        states.at(task, 0));
          if (c + 1 == chunks) return;
          open(kernel, task);
          aligned_row(shared.sums + i * W) = kernel.contribution(begin, begin + chunk_size);
          std::copy_n(kernel.state(0), states.size, states.at(task, c + 1));
        });
        run(tasks, [&](Kernel& kernel, Index task) {
          open(kernel, task);
          for (Index c = 0; c + 1 < chunks; ++c) {
            const Row<Scalar> sum = aligned_row(shared.sums + (task * chunks + c) * W);
            const Scalar* const before = states.at(task, c);
            Scalar* const after = states.at(task, c + 1);
            for (Index i = 0; i < states.size; i += W)
              aligned_row(after + i) +=
                  decay_row<Scalar>(sum, aligned_row(kernel.tokens().rate() + i)) * aligned_row(before + i);
          }
        });
        run(tasks * chunks, [&](Kernel& kernel, Index i) {
          const Index task = i / chunks, c = i % chunks, b = task / panels.count();
          open(kernel, task);
          std::copy_n(states.at(task, c), states.size, kernel.state(0));
          kernel.run(c * chunk_size, std::min(s.T, (c + 1) * chunk_size), y.out);
          if (c + 1 == chunks && !y.final_state.empty())
            write_states(kernel.state(0), kernel.tokens().channels(), s.N,
                         [&](Index d) { return y.final_state.row(b, d); });
        });
      });
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
