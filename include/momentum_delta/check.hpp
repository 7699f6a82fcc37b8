/// \file
/// Checks of a public call's arguments, made once, before anything is written. Every failure is a
/// std::invalid_argument "momentum_delta::<function>: <argument> ...", with sizes or index and value.
#pragma once

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "momentum_delta/detail/overlap.hpp"
#include "momentum_delta/sequence.hpp"

namespace momentum_delta::detail {

class Check {
 public:
  explicit Check(const char* function) : function_(function) {}

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
      if (x.stride[d] < 0 && x.shape[d] > 1)
        fail(name, " has strides ", text(x.stride), ": strides must be >= 0");
      size = std::min<Index>(1, size * x.shape[d]);
    }
    if (Rank == 4 && x.shape[Rank - 1] > 1 && x.stride[Rank - 1] != 1)
      fail(name, " has strides ", text(x.stride), ": the last one must be 1");
    if (!addressable(x))
      fail(name, " has shape ", text(x.shape), " and strides ", text(x.stride),
           ": more bytes than can be addressed");
    if (size > 0 && x.data == nullptr) fail(name, " has shape ", text(x.shape), " but its data is null");
    if (!std::is_const_v<Scalar> && !distinct_elements(x))
      fail(name, " has shape ", text(x.shape), " and strides ", text(x.stride),
           ": in an output each stride must step over all that smaller strides reach");
  }

  // Throws unless so many elements, and what kernels hold beside them, can be counted in bytes: there may
  // be no view of them whose memory shows it, as there is none of a state without tokens.
  template <std::size_t Rank>
  void countable(const char* meaning, const std::array<Index, Rank>& sizes) const {
    double elements = 1;
    for (const Index size : sizes) elements *= double(std::max<Index>(size, 1));
    if (elements > 0x1p46) fail(meaning, " = ", text(sizes), " are more elements than can be addressed");
  }

  // Throws unless the state is absent or of shape [N, HV, K, V].
  template <class Scalar>
  void state(const char* name, const StateView<Scalar>& x, const Sizes& s) const {
    if (!x.absent()) view(name, x, {s.N, s.HV, s.K, s.V}, "[N, HV, K, V]");
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
          using std::real, std::imag;
          const Scalar& value = x.at(b, t, h);
          const auto part = real(value);
          const char* problem = nullptr;
          if (std::isnan(part) || !std::isfinite(imag(value)))
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

 private:
  template <std::size_t Rank>
  static std::string text(const std::array<Index, Rank>& numbers) {
    std::string out = "[";
    for (std::size_t d = 0; d < Rank; ++d) out += (d ? ", " : "") + std::to_string(numbers[d]);
    return out + "]";
  }

  const char* function_;
};

// The memory of a call's arguments. Inputs are registered first; each output must then lie apart from all
// before it.
class Aliases {
 public:
  explicit Aliases(const Check& check) : check_(check) {}

  template <class Scalar, std::size_t Rank>
  void reads(const char* name, const StridedView<Scalar, Rank>& view) {
    if (!view.absent()) entries_[count_++] = {name, Footprint(view)};
  }

  // `same`: the input of name `same_name` that the output may be, as a whole.
  template <class Scalar, std::size_t Rank>
  void writes(const char* name, const StridedView<Scalar, Rank>& view, std::string_view same_name = {},
              const StridedView<const Scalar, Rank>& same = {}) {
    if (view.absent()) return;
    const bool in_place = view.data == same.data && view.shape == same.shape && view.stride == same.stride;
    const Footprint footprint(view);
    for (std::size_t i = 0; i < count_; ++i) {
      if (in_place && entries_[i].name == same_name) continue;
      if (overlap(footprint, entries_[i].footprint))
        check_.fail(name, " shares memory with ", entries_[i].name);
    }
    entries_[count_++] = {name, footprint};
  }

 private:
  struct Entry {
    std::string_view name;
    Footprint footprint;
  };
  const Check& check_;
  std::size_t count_ = 0;
  std::array<Entry, 48> entries_;  // layer_backward()'s are the most: weights, their gradients, tokens
};

template <class Scalar, class Storage>
void read_inputs(Aliases& memory, const Inputs<Scalar, Storage>& x) {
  memory.reads("q", x.q);
  memory.reads("k", x.k);
  memory.reads("v", x.v);
  memory.reads("p", x.p);
  memory.reads("log_alpha", x.log_alpha);
  memory.reads("log_mu", x.log_mu);
  memory.reads("beta", x.beta);
  memory.reads("eta", x.eta);
  memory.reads("initial_S", x.initial_S);
  memory.reads("initial_M", x.initial_M);
  memory.reads("cu_seqlens", StridedView<const Index, 1>(x.cu_seqlens.data(), {Index(x.cu_seqlens.size())}));
}

// May HV value heads share HK query and key heads in groups of equal size?
inline bool groups_evenly(Index HV, Index HK) {
  return HK == 0 ? HV == 0 : HV > 0 && HV % HK == 0;
}

// What a chunk of up to chunk_size tokens takes.
inline void check_chunk(const Check& check, const Sizes& s, Index chunk_size) {
  const Index C = std::min(chunk_size, s.longest);
  check.countable("a chunk of [tokens, tokens or K or V]", std::array{C, std::max({C, s.K, s.V})});
}

// What every call asks of its inputs and options.
template <class Scalar, class Storage>
void check_inputs(const Check& check, const Inputs<Scalar, Storage>& x, const Options& options) {
  if (x.q.absent()) check.fail("q is missing; its shape is [B, T, HK, K]");
  if (x.v.absent()) check.fail("v is missing; its shape is [B, T, HV, V]");
  check.memory("q", x.q);
  if (!x.cu_seqlens.empty())  // before their differences are taken
    check.cu_seqlens(x.cu_seqlens, x.q.shape[0], x.q.shape[1]);
  const Sizes s = sizes_of(x);
  check.view("k", x.k, {s.B, s.T, s.HK, s.K}, "[B, T, HK, K] of q");
  check.view("v", x.v, {s.B, s.T, s.HV, s.V}, "[B, T, HV, V] with B, T of q");
  if (!groups_evenly(s.HV, s.HK))
    check.fail("v has ", s.HV, " heads, which is no positive multiple of the ", s.HK, " heads of q and k");
  if (!x.p.absent()) {
    if (x.p.shape[2] == s.HK)
      check.view("p", x.p, {s.B, s.T, s.HK, s.K}, "[B, T, HK, K] of q");
    else
      check.view("p", x.p, {s.B, s.T, s.HV, s.K}, "[B, T, HK or HV, K] of q and v");
  }

  check.countable("tokens of [B, T]", std::array{s.B, s.T});
  check.countable("states of [N, HV, K, V]", std::array{s.N, s.HV, s.K, s.V});

  using Range = Check::Range;
  const Range log_gate = options.allow_positive_log_gates ? Range::signed_log_gate : Range::log_gate;
  check.gate("log_alpha", x.log_alpha, {s.B, s.T, s.HV}, log_gate);
  check.gate("log_mu", x.log_mu, {s.B, s.T, s.HV}, log_gate);
  check.gate("beta", x.beta, {s.B, s.T, s.HV}, Range::finite);
  check.gate("eta", x.eta, {s.B, s.T, s.HV}, Range::finite);

  using std::real, std::imag;
  if (x.scale && !(std::isfinite(real(*x.scale)) && std::isfinite(imag(*x.scale))))
    check.fail("scale = ", *x.scale, " is not finite");
  if (options.chunk_size && *options.chunk_size < 1)
    check.fail("options.chunk_size = ", *options.chunk_size, " is less than 1");
  if (options.algorithm == Algorithm::chunk) check_chunk(check, s, options.chunk_size.value_or(1));
  check.state("initial_S", x.initial_S, s);
  check.state("initial_M", x.initial_M, s);
}

template <class Scalar, class Storage>
void check_forward(const Check& check, const Inputs<Scalar, Storage>& x, const Outputs<Scalar, Storage>& y,
                   const Options& options) {
  check_inputs(check, x, options);
  const Sizes s = sizes_of(x);
  check.view("o", y.o, {s.B, s.T, s.HV, s.V}, "[B, T, HV, V] of v");
  check.state("final_S", y.final_S, s);
  check.state("final_M", y.final_M, s);

  Aliases memory(check);
  read_inputs(memory, x);
  memory.writes("o", y.o);
  memory.writes("final_S", y.final_S, "initial_S", x.initial_S);
  memory.writes("final_M", y.final_M, "initial_M", x.initial_M);
}

template <class Scalar, class Storage>
void check_step(const Check& check, const Inputs<Scalar, Storage>& x, const StateView<Scalar>& S,
                const StateView<Scalar>& M, const TokenView<Storage>& o, const Options& options) {
  if (x.q.absent()) check.fail("q is missing; its shape is [B, 1, HK, K]");
  if (x.q.shape[1] != 1) check.fail("q has T = ", x.q.shape[1], " tokens, not 1");
  if (!x.initial_S.absent()) check.fail("initial_S must be absent: the state is S");
  if (!x.initial_M.absent()) check.fail("initial_M must be absent: the state is M");
  if (!x.cu_seqlens.empty()) check.fail("cu_seqlens must be absent: every sequence has one token");
  if (options.algorithm == Algorithm::chunk)
    check.fail("options.algorithm is chunk, but one token is no chunk");
  if (options.chunk_size) check.fail("options.chunk_size is set, but one token is no chunk");
  check_inputs(check, x, options);
  const Sizes s = sizes_of(x);
  check.view("S", S, {s.B, s.HV, s.K, s.V}, "[B, HV, K, V]");
  check.view("M", M, {s.B, s.HV, s.K, s.V}, "[B, HV, K, V]");
  check.view("o", o, {s.B, s.T, s.HV, s.V}, "[B, T, HV, V] of v");

  Aliases memory(check);
  read_inputs(memory, x);
  memory.writes("S", S);
  memory.writes("M", M);
  memory.writes("o", o);
}

template <class Scalar, class Storage>
void check_backward(const Check& check, const Inputs<Scalar, Storage>& x,
                    const OutputGradients<Scalar, Storage>& dy, const InputGradients<Scalar, Storage>& dx,
                    const Options& options) {
  check_inputs(check, x, options);
  const Sizes s = sizes_of(x);
  const auto like = [&](const char* name, const auto& gradient, const char* input_name, const auto& input,
                        const char* meaning) {
    if (gradient.absent()) return;
    if (input.absent()) check.fail(name, " must be absent: ", input_name, " is absent");
    check.view(name, gradient, input.shape, meaning);
  };
  if (!dy.do_.absent()) check.view("do_", dy.do_, x.v.shape, "[B, T, HV, V] of v");
  check.state("dfinal_S", dy.dfinal_S, s);
  check.state("dfinal_M", dy.dfinal_M, s);
  like("dq", dx.dq, "q", x.q, "[B, T, HK, K] of q");
  like("dk", dx.dk, "k", x.k, "[B, T, HK, K] of k");
  like("dv", dx.dv, "v", x.v, "[B, T, HV, V] of v");
  like("dp", dx.dp, "p", x.p, "the shape of p");
  like("dlog_alpha", dx.dlog_alpha, "log_alpha", x.log_alpha, "[B, T, HV]");
  like("dlog_mu", dx.dlog_mu, "log_mu", x.log_mu, "[B, T, HV]");
  like("dbeta", dx.dbeta, "beta", x.beta, "[B, T, HV]");
  like("deta", dx.deta, "eta", x.eta, "[B, T, HV]");
  check.state("dinitial_S", dx.dinitial_S, s);
  check.state("dinitial_M", dx.dinitial_M, s);

  Aliases memory(check);
  read_inputs(memory, x);
  memory.reads("do_", dy.do_);
  memory.reads("dfinal_S", dy.dfinal_S);
  memory.reads("dfinal_M", dy.dfinal_M);
  memory.writes("dq", dx.dq);
  memory.writes("dk", dx.dk);
  memory.writes("dv", dx.dv);
  memory.writes("dp", dx.dp);
  memory.writes("dlog_alpha", dx.dlog_alpha);
  memory.writes("dlog_mu", dx.dlog_mu);
  memory.writes("dbeta", dx.dbeta);
  memory.writes("deta", dx.deta);
  if (dx.accumulate) {
    memory.writes("dinitial_S", dx.dinitial_S);
    memory.writes("dinitial_M", dx.dinitial_M);
  } else {
    memory.writes("dinitial_S", dx.dinitial_S, "dfinal_S", dy.dfinal_S);
    memory.writes("dinitial_M", dx.dinitial_M, "dfinal_M", dy.dfinal_M);
  }
}

}  // namespace momentum_delta::detail
