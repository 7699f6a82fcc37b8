// Checks of a public call's arguments, made once, before anything is written. Every failure is a
// std::invalid_argument "momentum_delta::<function>: <argument> ...", with sizes or index and value.
#pragma once

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

#include "momentum_delta/detail/overlap.hpp"
#include "momentum_delta/sequence.hpp"

namespace momentum_delta::detail {

class Check {
 public:
  // state_S, state_M: what the function calls the state it writes.
  explicit Check(const char* function, const char* state_S = "final_S", const char* state_M = "final_M")
      : S(state_S), M(state_M), function_(function) {}

  const char *S, *M;

  template <class... Words>
  [[noreturn]] void fail(const Words&... words) const {
    std::ostringstream text;
    text << "momentum_delta::" << function_ << ": ";
    (text << ... << words);
    throw std::invalid_argument(text.str());
  }

  // Throws unless the view has this shape and its memory can be used as it is.
  template <class Scalar, std::size_t Rank>
  void view(const char* name, const StridedView<Scalar, Rank>& x, std::array<Index, Rank> shape,
            const char* meaning) const {
    if (x.absent()) fail(name, " is missing; its shape is ", meaning, " = ", text(shape));
    if (x.shape != shape) fail(name, " has shape ", text(x.shape), ", not ", meaning, " = ", text(shape));
    memory(name, x);
  }

  // Throws unless the strides can be walked. Rank 4 holds vectors, whose elements are contiguous.
  template <class Scalar, std::size_t Rank>
  void memory(const char* name, const StridedView<Scalar, Rank>& x) const {
    Index size = 1;
    for (std::size_t d = 0; d < Rank; ++d) {
      if (x.shape[d] < 0) fail(name, " has shape ", text(x.shape), ": sizes must be >= 0");
      if (x.stride[d] < 0) fail(name, " has strides ", text(x.stride), ": strides must be >= 0");
      size = std::min<Index>(1, size * x.shape[d]);
    }
    if (Rank == 4 && x.shape[Rank - 1] > 1 && x.stride[Rank - 1] != 1)
      fail(name, " has strides ", text(x.stride), ": the last one must be 1");
    if (size > 0 && x.data == nullptr) fail(name, " has shape ", text(x.shape), " but its data is null");
    if (!std::is_const_v<Scalar> && !distinct_elements(x))
      fail(name, " has shape ", text(x.shape), " and strides ", text(x.stride),
           ": elements of an output must not share memory");
  }

  enum class Range { finite, log_gate, signed_log_gate };

  // Throws unless every value of a present gate lies in its range.
  template <class Scalar>
  void gate(const char* name, const GateView<const Scalar>& x, std::array<Index, 3> shape,
            Range range) const {
    if (x.absent()) return;
    view(name, x, shape, "[B, T, HV]");
    for (Index b = 0; b < shape[0]; ++b) {
      for (Index t = 0; t < shape[1]; ++t) {
        for (Index h = 0; h < shape[2]; ++h) {
          using std::real;
          const Scalar& value = x.data[b * x.stride[0] + t * x.stride[1] + h * x.stride[2]];
          const auto part = real(value);
          const char* problem = nullptr;
          if (std::isnan(part))
            problem = "not a number";
          else if (std::isinf(part) && part > 0)
            problem = "infinite";
          else if (range == Range::finite && std::isinf(part))
            problem = "infinite";
          else if (range == Range::log_gate && part > 0)
            problem = "positive; a log gate is <= 0 unless options.allow_positive_log_gates is set";
          if (problem) fail(name, "[", b, ", ", t, ", ", h, "] = ", value, " is ", problem);
        }
      }
    }
  }

  // Offsets of packed sequences: 0 = first, never decreasing, last = T.
  void cu_seqlens(std::span<const Index> offsets, Index B, Index T) const {
    if (B != 1) fail("cu_seqlens needs B = 1, but q has B = ", B);
    if (offsets[0] != 0) fail("cu_seqlens[0] = ", offsets[0], " is not 0");
    for (std::size_t n = 1; n < offsets.size(); ++n) {
      if (offsets[n] < offsets[n - 1])
        fail("cu_seqlens[", n, "] = ", offsets[n], " is less than cu_seqlens[", n - 1,
             "] = ", offsets[n - 1]);
      if (offsets[n] > T) fail("cu_seqlens[", n, "] = ", offsets[n], " is more than T = ", T);
    }
    if (offsets.back() != T)
      fail("cu_seqlens[", offsets.size() - 1, "] = ", offsets.back(), " is less than T = ", T,
           ": the last tokens belong to no sequence");
  }

  template <class A, class B>
  void apart(const char* output, const A& a, const char* other, const B& b) const {
    if (!a.absent() && !b.absent() && overlap(Footprint(a), Footprint(b)))
      fail(output, " shares memory with ", other);
  }

 private:
  template <std::size_t Rank>
  static std::string text(const std::array<Index, Rank>& numbers) {
    std::string out = "[";
    for (std::size_t d = 0; d < Rank; ++d) out += (d ? ", " : "") + std::to_string(numbers[d]);
    return out + "]";
  }

  const char* function_;
};

template <class Scalar, std::size_t Rank>
bool same_view(const StridedView<const Scalar, Rank>& a, const StridedView<Scalar, Rank>& b) {
  return a.data == b.data && a.shape == b.shape && a.stride == b.stride;
}

// All that forward() and step() ask of their arguments.
template <class Scalar>
void check_forward(const Check& check, const Inputs<Scalar>& x, const Outputs<Scalar>& y,
                   const Options& options) {
  if (x.q.absent()) check.fail("q is missing; its shape is [B, T, HK, K]");
  if (x.v.absent()) check.fail("v is missing; its shape is [B, T, HV, V]");
  const Sizes s = sizes_of(x);
  check.memory("q", x.q);
  check.view("k", x.k, {s.B, s.T, s.HK, s.K}, "[B, T, HK, K] of q");
  check.view("v", x.v, {s.B, s.T, s.HV, s.V}, "[B, T, HV, V] with B, T of q");
  if (s.HK == 0 ? s.HV != 0 : s.HV % s.HK != 0)
    check.fail("v has ", s.HV, " heads, which is no multiple of the ", s.HK, " heads of q and k");
  if (!x.p.absent()) {
    if (x.p.shape[2] == s.HK)
      check.view("p", x.p, {s.B, s.T, s.HK, s.K}, "[B, T, HK, K] of q");
    else
      check.view("p", x.p, {s.B, s.T, s.HV, s.K}, "[B, T, HK or HV, K] of q and v");
  }

  using Range = Check::Range;
  const Range log_gate = options.allow_positive_log_gates ? Range::signed_log_gate : Range::log_gate;
  check.gate("log_alpha", x.log_alpha, {s.B, s.T, s.HV}, log_gate);
  check.gate("log_mu", x.log_mu, {s.B, s.T, s.HV}, log_gate);
  check.gate("beta", x.beta, {s.B, s.T, s.HV}, Range::finite);
  check.gate("eta", x.eta, {s.B, s.T, s.HV}, Range::finite);

  using std::real;
  if (x.scale && !std::isfinite(real(*x.scale))) check.fail("scale = ", *x.scale, " is not finite");
  if (options.chunk_size && *options.chunk_size < 1)
    check.fail("options.chunk_size = ", *options.chunk_size, " is less than 1");
  if (!x.cu_seqlens.empty()) check.cu_seqlens(x.cu_seqlens, s.B, s.T);

  const auto state = [&](const char* name, const auto& view) {
    if (!view.absent()) check.view(name, view, {s.N, s.HV, s.K, s.V}, "[N, HV, K, V]");
  };
  state("initial_S", x.initial_S);
  state("initial_M", x.initial_M);
  check.view("o", y.o, {s.B, s.T, s.HV, s.V}, "[B, T, HV, V] of v");
  state(check.S, y.final_S);
  state(check.M, y.final_M);

  const auto apart_from_inputs = [&](const char* name, const auto& out) {
    check.apart(name, out, "q", x.q);
    check.apart(name, out, "k", x.k);
    check.apart(name, out, "v", x.v);
    check.apart(name, out, "p", x.p);
    check.apart(name, out, "log_alpha", x.log_alpha);
    check.apart(name, out, "log_mu", x.log_mu);
    check.apart(name, out, "beta", x.beta);
    check.apart(name, out, "eta", x.eta);
  };
  apart_from_inputs("o", y.o);
  apart_from_inputs(check.S, y.final_S);
  apart_from_inputs(check.M, y.final_M);
  check.apart("o", y.o, "initial_S", x.initial_S);
  check.apart("o", y.o, "initial_M", x.initial_M);
  check.apart("o", y.o, check.S, y.final_S);
  check.apart("o", y.o, check.M, y.final_M);
  check.apart(check.S, y.final_S, check.M, y.final_M);
  check.apart(check.S, y.final_S, "initial_M", x.initial_M);
  check.apart(check.M, y.final_M, "initial_S", x.initial_S);
  if (!same_view(x.initial_S, y.final_S)) check.apart(check.S, y.final_S, "initial_S", x.initial_S);
  if (!same_view(x.initial_M, y.final_M)) check.apart(check.M, y.final_M, "initial_M", x.initial_M);
}

}  // namespace momentum_delta::detail
