/// \file
/// Checks of the selective scan's arguments, made once, before anything is written.
#pragma once

#include "momentum_delta/check.hpp"
#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/selective_scan/inputs.hpp"

namespace momentum_delta::detail {

template <class Scalar, std::size_t Rank>
void check_array(const Check& check, const char* name, const ArrayView<Scalar, Rank>& x,
                 std::array<Index, Rank> shape, const char* meaning) {
  check.view(name, x, shape, meaning);
  if (x.shape[Rank - 1] > 1 && x.stride[Rank - 1] != 1)
    check.fail(name, " has ", x.stride[Rank - 1],
               " as its last stride, not 1: neighbours must be contiguous");
}

template <class Scalar>
bool is_finite(const Scalar& x) {
  using std::real, std::imag;
  return std::isfinite(real(x)) && std::isfinite(imag(x));
}

// dt, or what softplus makes it of, must be finite, and dt >= 0. Rows are scanned without a branch; the first
// bad element is looked for only once there is one.
template <class Scalar, class Storage>
void check_steps(const Check& check, const ScanInputs<Scalar, Storage>& x, const ScanSizes& s) {
  const bool any_sign = x.delta_softplus;
  const auto sum = [&](const Storage& delta, Index d) {
    return Scalar(delta) + (x.delta_bias.absent() ? Scalar(0) : x.delta_bias.data[d]);
  };
  const auto good = [&](const Scalar& step) {
    using std::real;
    return is_finite(step) && (any_sign || real(step) >= 0);
  };
  const auto good_row = [&](const Storage* row) {
    constexpr Index W = panel_width<Scalar>;
    if constexpr (std::is_floating_point_v<Scalar>) {
      const Scalar* const bias = x.delta_bias.data;
      Row<Scalar> worst = Row<Scalar>::Zero();  // inf - inf and NaN - NaN are NaN, anything else gives 0
      Row<Scalar> least = worst;
      const auto add = [&](Index d, Index width) MOMENTUM_DELTA_INLINE {
        Row<Scalar> step = load_row<Scalar>(row + d, width);
        if (bias) step += load_row<Scalar>(bias + d, width);
        worst += step - step;
        least = least.min(step);
      };
      const Index whole = s.D / W * W;
      for (Index d = 0; d < whole; d += W) add(d, W);
      if (whole < s.D) add(whole, s.D - whole);
      return (worst == Scalar(0)).all() && (any_sign || (least >= Scalar(0)).all());
    } else {
      for (Index d = 0; d < s.D; ++d)
        if (!good(sum(row[d], d))) return false;
      return true;
    }
  };
  for (Index b = 0; b < s.B; ++b) {
    for (Index t = 0; t < s.T; ++t) {
      const Storage* const row = x.delta.row(b, t);
      if (s.D == 0 || good_row(row)) continue;
      for (Index d = 0; d < s.D; ++d) {
        const Scalar step = sum(row[d], d);
        if (good(step)) continue;
        if (!is_finite(Scalar(row[d])))
          check.fail("delta[", b, ", ", t, ", ", d, "] = ", Scalar(row[d]), " is not finite");
        if (!is_finite(step))
          check.fail("delta[", b, ", ", t, ", ", d, "] + delta_bias[", d, "] = ", step, " is not finite");
        check.fail("delta[", b, ", ", t, ", ", d, "] + delta_bias[", d, "] = ", step,
                   " is negative; without delta_softplus it is dt, which is >= 0");
      }
    }
  }
}

// What the states at chunk boundaries and a chunk take.
inline void check_scan_chunks(const Check& check, const ScanSizes& s, Index chunk_size) {
  check.countable("states of [chunks, B, D, N]", std::array{s.T / chunk_size + 1, s.B, s.D, s.N});
  check.countable("a chunk of [tokens, N]", std::array{std::min(chunk_size, s.T), s.N});
}

template <class Scalar, class Storage>
void check_scan_inputs(const Check& check, const ScanInputs<Scalar, Storage>& x, const ScanOptions& options) {
  if (x.u.absent()) check.fail("u is missing; its shape is [B, T, D]");
  if (x.A.absent()) check.fail("A is missing; its shape is [D, N]");
  if (x.B.absent()) check.fail("B is missing; its shape is [B, T, G, N]");
  const ScanSizes s = sizes_of(x);
  check_array(check, "u", x.u, x.u.shape, "[B, T, D]");
  check_array(check, "delta", x.delta, {s.B, s.T, s.D}, "[B, T, D] of u");
  check_array(check, "A", x.A, {s.D, s.N}, "[D, N] with D of u");
  check.view("B", x.B, {s.B, s.T, s.G, s.N}, "[B, T, G, N] of u and A");
  check.view("C", x.C, {s.B, s.T, s.G, s.N}, "[B, T, G, N] of u, B and A");
  if (s.G < 1 || s.D % s.G != 0)
    check.fail("B has ", s.G, " groups, which do not divide the ", s.D, " channels of u evenly");
  if (!x.D.absent()) check_array(check, "D", x.D, {s.D}, "[D] of u");
  if (!x.z.absent()) check_array(check, "z", x.z, {s.B, s.T, s.D}, "[B, T, D] of u");
  if (!x.delta_bias.absent()) check_array(check, "delta_bias", x.delta_bias, {s.D}, "[D] of u");
  if (!x.initial_state.absent())
    check_array(check, "initial_state", x.initial_state, {s.B, s.D, s.N}, "[B, D, N] of u and A");
  if (options.chunk_size && *options.chunk_size < 1)
    check.fail("options.chunk_size = ", *options.chunk_size, " is less than 1");
  check.countable("states of [B, D, N]", std::array{s.B, s.D, s.N});

  for (Index d = 0; d < s.D; ++d) {
    if (!x.delta_bias.absent() && !is_finite(x.delta_bias.data[d]))
      check.fail("delta_bias[", d, "] = ", x.delta_bias.data[d], " is not finite");
    for (Index n = 0; n < s.N; ++n) {
      using std::real, std::imag;
      const Scalar& A = x.A.row(d)[n];
      if (std::isnan(real(A)) || !std::isfinite(imag(A)))
        check.fail("A[", d, ", ", n, "] = ", A, " is not a number");
      if (real(A) > 0)
        check.fail("A[", d, ", ", n, "] = ", A, " is positive; a decay exp(dt A) needs A in [-inf, 0]");
    }
  }
  check_steps(check, x, s);
}

template <class Scalar, class Storage>
void read_inputs(Aliases& memory, const ScanInputs<Scalar, Storage>& x) {
  memory.reads("u", x.u);
  memory.reads("delta", x.delta);
  memory.reads("A", x.A);
  memory.reads("B", x.B);
  memory.reads("C", x.C);
  memory.reads("D", x.D);
  memory.reads("z", x.z);
  memory.reads("delta_bias", x.delta_bias);
  memory.reads("initial_state", x.initial_state);
}

template <class Scalar, class Storage>
void check_scan_forward(const Check& check, const ScanInputs<Scalar, Storage>& x,
                        const ScanOutputs<Scalar, Storage>& y, const ScanOptions& options) {
  check_scan_inputs(check, x, options);
  const ScanSizes s = sizes_of(x);
  check_array(check, "out", y.out, {s.B, s.T, s.D}, "[B, T, D] of u");
  if (!y.final_state.absent())
    check_array(check, "final_state", y.final_state, {s.B, s.D, s.N}, "[B, D, N] of u and A");

  Aliases memory(check);
  read_inputs(memory, x);
  memory.writes("out", y.out);
  memory.writes("final_state", y.final_state, "initial_state", x.initial_state);
}

template <class Scalar, class Storage>
void check_scan_step(const Check& check, const ScanInputs<Scalar, Storage>& x,
                     const ArrayView<Scalar, 3>& state, const ArrayView<Storage, 3>& out,
                     const ScanOptions& options) {
  if (x.u.absent()) check.fail("u is missing; its shape is [B, 1, D]");
  if (x.u.shape[1] != 1) check.fail("u has T = ", x.u.shape[1], " tokens, not 1");
  if (!x.initial_state.absent()) check.fail("initial_state must be absent: the state is an argument");
  if (options.algorithm == Algorithm::chunk)
    check.fail("options.algorithm is chunk, but one token is no chunk");
  if (options.chunk_size) check.fail("options.chunk_size is set, but one token is no chunk");
  check_scan_inputs(check, x, options);
  const ScanSizes s = sizes_of(x);
  check_array(check, "state", state, {s.B, s.D, s.N}, "[B, D, N] of u and A");
  check_array(check, "out", out, {s.B, s.T, s.D}, "[B, T, D] of u");

  Aliases memory(check);
  read_inputs(memory, x);
  memory.writes("state", state);
  memory.writes("out", out);
}

template <class Scalar, class Storage>
void check_scan_backward(const Check& check, const ScanInputs<Scalar, Storage>& x,
                         const ScanOutputGradients<Scalar, Storage>& dy,
                         const ScanInputGradients<Scalar, Storage>& dx, const ScanOptions& options) {
  check_scan_inputs(check, x, options);
  const ScanSizes s = sizes_of(x);
  if (!dy.dout.absent()) check_array(check, "dout", dy.dout, {s.B, s.T, s.D}, "[B, T, D] of u");
  if (!dy.dfinal_state.absent())
    check_array(check, "dfinal_state", dy.dfinal_state, {s.B, s.D, s.N}, "[B, D, N] of u and A");
  const auto like = [&](const char* name, const auto& gradient, const char* input_name, const auto& input,
                        const char* meaning) {
    if (gradient.absent()) return;
    if (input.absent()) check.fail(name, " must be absent: ", input_name, " is absent");
    check_array(check, name, gradient, input.shape, meaning);
  };
  like("du", dx.du, "u", x.u, "[B, T, D] of u");
  like("ddelta", dx.ddelta, "delta", x.delta, "[B, T, D] of u");
  like("dA", dx.dA, "A", x.A, "[D, N] of A");
  if (!dx.dB.absent()) check.view("dB", dx.dB, x.B.shape, "[B, T, G, N] of B");
  if (!dx.dC.absent()) check.view("dC", dx.dC, x.C.shape, "[B, T, G, N] of C");
  like("dD", dx.dD, "D", x.D, "[D] of u");
  like("dz", dx.dz, "z", x.z, "[B, T, D] of u");
  like("ddelta_bias", dx.ddelta_bias, "delta_bias", x.delta_bias, "[D] of u");
  if (!dx.dinitial_state.absent())
    check_array(check, "dinitial_state", dx.dinitial_state, {s.B, s.D, s.N}, "[B, D, N] of u and A");

  Aliases memory(check);
  read_inputs(memory, x);
  memory.reads("dout", dy.dout);
  memory.reads("dfinal_state", dy.dfinal_state);
  memory.writes("du", dx.du);
  memory.writes("ddelta", dx.ddelta);
  memory.writes("dA", dx.dA);
  memory.writes("dB", dx.dB);
  memory.writes("dC", dx.dC);
  memory.writes("dD", dx.dD);
  memory.writes("dz", dx.dz);
  memory.writes("ddelta_bias", dx.ddelta_bias);
  if (dx.accumulate)
    memory.writes("dinitial_state", dx.dinitial_state);
  else
    memory.writes("dinitial_state", dx.dinitial_state, "dfinal_state", dy.dfinal_state);
}

}  // namespace momentum_delta::detail
