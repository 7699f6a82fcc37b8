// One call of the momentum delta rule, chosen by a byte string, and everything that is to hold of it: a legal
// one equals the definition, an illegal one is refused by name with nothing written.
#pragma once

#include <functional>
#include <sstream>
#include <type_traits>

#include "../../examples/kernels/kernels.hpp"
#include "buffer.hpp"
#include "bytes.hpp"
#include "call.hpp"

namespace fuzz {

using momentum_delta::GateView;
using momentum_delta::InputGradients;
using momentum_delta::Inputs;
using momentum_delta::Options;
using momentum_delta::OutputGradients;
using momentum_delta::Outputs;
using momentum_delta::Saved;
using momentum_delta::StateView;
using momentum_delta::TokenView;
using test::Gradients;
using test::Problem;
using test::Results;
using test::Upstream;

// The order is that of the names.
enum class P { of_keys, of_values, absent };
enum class Level {  // of a gate's values
  mild,
  absent,
  zero,
  tiny,
  denormal,
  moderate,
  underflowing,
  strong,
  huge,
  reset,
  one_reset,
  mixed,
  positive
};
enum class Rate { mild, absent, zero, one, minus_one, two, tiny, denormal, mixed };

inline constexpr const char* p_names[] = {"of keys", "of values", "absent"};
inline constexpr const char* level_names[] = {"mild",      "absent",       "zero",    "tiny", "denormal",
                                              "moderate",  "underflowing", "strong",  "huge", "reset",
                                              "one reset", "mixed",        "positive"};
inline constexpr const char* rate_names[] = {"mild", "absent", "zero",     "one",  "minus one",
                                             "two",  "tiny",   "denormal", "mixed"};

// What makes a call illegal, in any call, in forward and backward, in backward, and in step.
inline constexpr const char* illegal_names[] = {
    "q missing", "v missing", "k shape", "v heads", "gate shape", "null data", "negative stride",
    "inner stride", "negative size", "p heads", "p channels", "o missing", "o shape", "o repeats",
    "o shares v", "states share", "NaN gate", "infinite gate", "positive gate", "scale", "chunk size",
    // forward and backward
    "offsets of two batches", "first offset", "offsets decrease", "offset past T", "last offset",
    "wild offsets", "initial_S shape", "final_M shape", "final_S shifted",
    // backward
    "saved is empty", "saved was moved from", "saved of other T", "saved of other V", "other chunk size",
    "dq shape", "gradient of absent input", "dv shares v", "dk shares dq", "accumulated in place", "do shape",
    "dv repeats", "dfinal_S shape",
    // step
    "two tokens", "initial_S in step", "S missing", "chunk size in step", "chunk form in step",
    "offsets in step"};
inline constexpr int illegal_count = int(std::size(illegal_names));

// Everything about a call but its numbers, which follow from `seed`.
struct Call {
  Kind kind;
  Type type;
  Index B, T, HK, HV, K, V;
  std::vector<Index> cu_seqlens;
  P p;
  Level log_alpha, log_mu;
  Rate beta, eta;
  bool initial_S, initial_M;
  Final final_S, final_M;
  std::optional<double> scale;
  Algorithm algorithm, backward_algorithm;
  std::optional<Index> chunk_size;
  bool backward_chunk_size;  // backward() is told it too
  int threads;               // 0: no executor
  bool workspace;
  Index interval;
  bool keep_u;
  unsigned upstream, wanted;  // a bit for each gradient that is given, and asked for
  bool accumulate, in_place;  // dinitial_S and dinitial_M are dfinal_S and dfinal_M
  int illegal;                // an index of illegal_names, or -1
  std::uint64_t seed;
  std::array<std::uint8_t, 26> layouts;

  explicit Call(Bytes bytes) {
    static constexpr std::array<Index, 16> sizes = {3, 1, 2, 4, 5, 7, 8, 9, 0, 15, 16, 17, 31, 32, 33, 40};
    kind = Kind(bytes.below(3));
    type = Type(bytes.below(4));
    illegal = bytes.byte() % 4 == 3 ? bytes.byte() % illegal_count : -1;
    seed = bytes.word(2);
    B = bytes.pick<Index, 16>({1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0});
    T = bytes.pick(sizes);
    HK = bytes.pick<Index, 16>({1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 0});
    if (HK == 0) B = std::max<Index>(B, 1);  // a dense array without any sizes is an absent one
    HV = HK * bytes.pick<Index, 4>({1, 1, 2, 3});
    K = bytes.pick(sizes);
    V = bytes.pick(sizes);
    // At most so many updates of a state's elements: the oracle is to take a few milliseconds.
    while (B * T * HV * K * V > 60000) (T > 16 ? T : K > V ? K : V) /= 2;
    if (kind == Kind::step) T = 1;
    if (const int sequences = bytes.below(8); sequences > 4 && kind != Kind::step) {
      B = 1;
      cu_seqlens = {0};
      for (int n = 5; n < sequences; ++n) cu_seqlens.push_back(Index(bytes.byte()) % (T + 1));
      cu_seqlens.push_back(T);
      std::sort(cu_seqlens.begin(), cu_seqlens.end());
    }
    p = P(bytes.below(3));
    log_alpha = Level(bytes.below(int(std::size(level_names))));
    log_mu = Level(bytes.below(int(std::size(level_names))));
    beta = Rate(bytes.below(int(std::size(rate_names))));
    eta = Rate(bytes.below(int(std::size(rate_names))));
    const std::uint8_t states = bytes.byte();
    initial_S = states % 2 == 0;
    initial_M = states / 2 % 2 == 0;
    final_S = Final(states / 4 % 3);
    final_M = Final(states / 12 % 3);
    if (kind == Kind::step) {
      initial_S = initial_M = true;
      final_S = final_M = Final::in_place;
    }
    if (!initial_S && final_S == Final::in_place) final_S = Final::apart;
    if (!initial_M && final_M == Final::in_place) final_M = Final::apart;
    const int scaled = bytes.below(5);
    if (scaled > 0) scale = std::array{1., 0., -2., 0.5}[std::size_t(scaled - 1)];
    algorithm = Algorithm(bytes.below(3));
    chunk_size = Index(bytes.pick<int, 8>({4, 1, 2, 3, 7, 16, 33, 1000}));
    if (bytes.below(4) == 3) chunk_size.reset();
    backward_algorithm = Algorithm(bytes.below(3));
    backward_chunk_size = bytes.flag();
    if (kind == Kind::step) {
      if (algorithm == Algorithm::chunk) algorithm = Algorithm::automatic;
      chunk_size.reset();
    }
    threads = bytes.below(4);
    workspace = bytes.flag();
    interval = bytes.pick<Index, 4>({1, 2, 3, 1000});
    keep_u = bytes.flag();
    upstream = ~unsigned(bytes.byte()) & 7;
    wanted = ~unsigned(bytes.word(2)) & 0x3ff;
    const std::uint8_t how = bytes.byte();
    accumulate = how % 4 == 1;
    in_place = how % 4 == 2;
    for (std::uint8_t& layout : layouts) layout = bytes.byte();
  }

  bool allows_positive() const { return log_alpha == Level::positive || log_mu == Level::positive; }
  Index states() const { return cu_seqlens.empty() ? B : Index(cu_seqlens.size()) - 1; }
  std::vector<Index> keys() const { return {B, T, HK, K}; }
  std::vector<Index> p_shape() const { return {B, T, p == P::of_values ? HV : HK, K}; }
  std::vector<Index> values() const { return {B, T, HV, V}; }
  std::vector<Index> gates() const { return {B, T, HV}; }
  std::vector<Index> state_shape() const { return {states(), HV, K, V}; }

  // visit(what, which) for each choice.
  template <class Visit>
  void for_each_class(const Visit& visit) const {
    const bool training = kind == Kind::training;
    visit("kind", kind_names[int(kind)]);
    visit("type", type_names[int(type)]);
    visit("algorithm", algorithm_names[int(algorithm)]);
    visit("p", p_names[int(p)]);
    visit("log_alpha", level_names[int(log_alpha)]);
    visit("log_mu", level_names[int(log_mu)]);
    visit("beta", rate_names[int(beta)]);
    visit("eta", rate_names[int(eta)]);
    visit("initial_S", initial_S ? "present" : "absent");
    visit("initial_M", initial_M ? "present" : "absent");
    visit("final_S", final_names[int(final_S)]);
    visit("final_M", final_names[int(final_M)]);
    visit("scale", scale ? "given" : "absent");
    visit("sequences", cu_seqlens.empty() ? "batches" : "packed");
    visit("chunk size", !chunk_size ? "automatic" : *chunk_size > T ? "larger than T" : "at most T");
    visit("executor", std::to_string(threads));
    visit("workspace", workspace ? "given" : "own");
    visit("sizes", B * T * HV * K * V == 0 ? "with a zero" : "positive");
    for (const auto& [name, i] : {std::pair("q", 0), {"log_mu", 5}, {"o", 10}}) {
      const Layout layout(layouts[std::size_t(i)]);
      visit(name, i < 10 && layout.broadcast >= 0 ? "repeated"
                  : layout.gap > 0                ? "with gaps"
                                                  : "without gaps");
    }
    if (!training) return;
    visit("backward algorithm", algorithm_names[int(backward_algorithm)]);
    visit("interval", std::to_string(interval));
    visit("u", keep_u ? "kept" : "not kept");
    visit("gradients", accumulate ? "accumulated" : in_place ? "in place" : "apart");
    for (int i = 0; i < 3; ++i)
      visit("upstream " + std::to_string(i), upstream >> i & 1 ? "given" : "absent");
    for (int i = 0; i < 10; ++i) visit("gradient " + std::to_string(i), wanted >> i & 1 ? "wanted" : "not");
  }

  std::string text() const {
    std::ostringstream out;
    out << "B " << B << " T " << T << " HK " << HK << " HV " << HV << " K " << K << " V " << V;
    for_each_class([&](const auto& what, const auto& which) { out << ", " << what << " " << which; });
    if (chunk_size) out << ", chunk_size " << *chunk_size;
    if (scale) out << ", scale " << *scale;
    for (std::size_t n = 0; n < cu_seqlens.size(); ++n) out << (n ? " " : ", cu_seqlens ") << cu_seqlens[n];
    if (illegal >= 0) out << ", illegal: " << illegal_names[illegal];
    out << ", seed " << seed << ", layouts";
    for (const std::uint8_t layout : layouts) out << " " << int(layout);
    return out.str();
  }
};

[[noreturn]] inline void fail(const Call& call, const std::string& message) {
  throw Failure(message + ": " + call.text());
}

// Every term of every sum positive: |q|, |v|, |k|, and p, beta and eta negative, for which the rule adds what
// it otherwise subtracts. Its results are how large the sums of results and gradients are before anything in
// them cancels. Every rounding error is relative to a term of them.
inline Problem<double> uncancelled(Problem<double> x) {
  if (x.p.absent()) x.p = x.k;
  const auto rates = [&](Array<double>& gate) {
    if (gate.absent())
      gate = {{x.v.shape[0], x.v.shape[1], x.v.shape[2]},
              std::vector<double>(std::size_t(x.v.shape[0] * x.v.shape[1] * x.v.shape[2]), 1)};
    for (double& value : gate.values) value = -std::abs(value);
  };
  for (auto* a : {&x.q, &x.k, &x.v, &x.initial_S, &x.initial_M})
    for (double& value : a->values) value = std::abs(value);
  for (double& value : x.p.values) value = -std::abs(value);
  rates(x.beta);
  rates(x.eta);
  if (x.scale) x.scale = std::abs(*x.scale);
  return x;
}

// What an exponent of n summed log gates, s_1 .. s_n, adds to the rounding errors of its decay, in eps:
// |s_1| / 2 + .. + |s_n| / 2 a chunk, at most n / 2 times all logs. Decays below e^-69 = 1e-30 do not count.
inline double decay_rounding(const Call& c, const Problem<double>& x) {
  double worst = 0;
  for (Index b = 0; b < c.B; ++b) {
    for (Index h = 0; h < c.HV; ++h) {
      double total = 0;
      for (const auto* gate : {&x.log_alpha, &x.log_mu}) {
        double sum = 0;
        for (Index t = 0; t < c.T && !gate->absent(); ++t)
          sum += std::min(std::abs(gate->values[std::size_t((b * c.T + t) * c.HV + h)]), 69.);
        total += std::min(sum, 69.);
      }
      worst = std::max(worst, total);
    }
  }
  return double(std::min<Index>(c.T, c.chunk_size.value_or(32))) / 2 * worst;
}

// The error of x in units of 4 E + (8 + decay_rounding) eps size: problem.hpp's budget, with the eps relative
// to the size of the terms, because where a result of a few elements is a small difference of large terms, E
// may be any part of an eps of the terms by luck. Infinite if the definition itself has more than its
// rounding errors: each of T steps sums K or V terms, and rounds a few more times.
template <class Scalar>
double error_ratio(const Call& call, double units, const Array<Scalar>& x, const Array<Scalar>& definition,
                   const Array<long double>& exact, const Array<long double>& sizes) {
  constexpr double eps = std::numeric_limits<Scalar>::epsilon();
  const double size = double(std::max(rms(sizes), 1e-30L));
  const double E = double(rms(difference(definition, exact)));
  if (!(E <= double((call.T + 1) * (call.K + call.V + 8)) * eps * size)) return test::infinity;
  const double error = double(rms(difference(x, exact)));
  return std::isnan(error) ? test::infinity : error / (4 * E + units * eps * size);
}

// A call with its memory.
template <class Scalar, class Storage>
class Rule : Checks<Rule<Scalar, Storage>> {
 public:
  explicit Rule(const Call& c, Sabotage sabotage = Sabotage::none)
      : Base(sabotage), c_(c), random_(c.seed), saved_(c.interval, c.keep_u) {
    make_inputs();
    make_outputs();
    if (c.kind == Kind::training) make_gradients();
    in_.cu_seqlens = c.cu_seqlens;
    if (c.scale) in_.scale = Scalar(*c.scale);
    options_ = {.algorithm = c.algorithm,
                .chunk_size = c.chunk_size,
                .allow_positive_log_gates = c.allows_positive(),
                .executor = executor(c.threads),
                .workspace = c.workspace ? workspace() : nullptr};
    backward_options_ = options_;
    backward_options_.algorithm = c.backward_algorithm;
    if (!c.backward_chunk_size) backward_options_.chunk_size.reset();
  }

  // Makes the call and checks it. Returns whether it was illegal: the other choices may not allow to spoil it
  // in the way chosen.
  bool check() {
    const bool step = c_.kind == Kind::step;
    if (c_.illegal >= 0 && spoil_forward()) {
      refused(step ? "step" : "forward", [&] { forward(); });
      if (!saved_.empty()) fail(c_, "a refused call filled saved");
      return true;
    }
    const auto plain = run_plain();
    remember();
    const std::vector<Scalar> S0 = S0_.memory, M0 = M0_.memory;
    forward();
    if (sabotage_ == Sabotage::value)
      o_.for_each([](std::size_t, Storage& x) { x = Storage(Scalar(x) + 1); });
    if (sabotage_ == Sabotage::gap) o_.memory.front() = Storage(7.f);
    if (sabotage_ == Sabotage::input) q_.memory.front() = Storage(7.f);
    check_memory();
    same("o", o_, plain.first.o);
    same("final_S", c_.final_S == Final::in_place ? S0_ : S_, plain.first.final_S);
    same("final_M", c_.final_M == Final::in_place ? M0_ : M_, plain.first.final_M);
    if (c_.kind == Kind::training) {
      S0_.memory = S0;  // backward() is to see what forward() saw
      M0_.memory = M0;
      if (c_.illegal >= 0 && spoil_backward()) {
        refused("backward", [&] { backward(); });
        return true;
      }
      check_backward(plain.second);
    }
    compare(plain.first, plain.second);
    return false;
  }

 private:
  using Base = Checks<Rule>;
  friend Base;
  using Base::check_gradients, Base::check_memory, Base::refused, Base::remember, Base::sabotage_, Base::same;

  template <class T>
  using Tokens = Buffer<T, 4>;
  using State = Buffer<Scalar, 4>;
  using Gate = Buffer<Scalar, 3>;

  // ---- the call's memory

  Layout layout(int i, bool can_repeat = true) const {
    Layout layout(c_.layouts[std::size_t(i)]);
    if (!can_repeat) layout.broadcast = -1;
    return layout;
  }
  template <class T>
  void fill(Tokens<T>& to, double length = 0) {
    const std::size_t D = std::size_t(to.shape[3]);
    Array<Scalar> x = examples::zeros<Scalar>({to.shape.begin(), to.shape.end()});
    for (Scalar& value : x.values) value = Scalar(random_.normal());
    for (std::size_t i = 0; length > 0 && i < x.values.size(); i += D) {
      Scalar sum = 0;
      for (std::size_t d = i; d < i + D; ++d) sum += x.values[d] * x.values[d];
      for (std::size_t d = i; d < i + D; ++d) x.values[d] *= Scalar(length) / std::sqrt(sum);
    }
    to.set(x);
  }
  double level(Level level, bool chosen) {
    constexpr double inf = test::infinity;
    switch (level) {
      case Level::mild:
        return random_.uniform(-0.2, 0);
      case Level::tiny:
        return -1e-30;
      case Level::denormal:
        return -double(std::numeric_limits<Scalar>::denorm_min());
      case Level::moderate:
        return random_.uniform(-3, 0);
      case Level::underflowing:
        return -104;
      case Level::strong:
        return -1e4;
      case Level::huge:
        return double(std::numeric_limits<Scalar>::lowest());
      case Level::reset:
        return -inf;
      case Level::one_reset:
        return chosen ? -inf : 0;
      case Level::mixed:
        return this->level(Level(random_.bits() % int(Level::one_reset)), chosen);
      case Level::positive:
        return random_.uniform(0, 0.1);
      default:
        return 0;
    }
  }
  double rate(Rate rate) {
    switch (rate) {
      case Rate::mild:
        return random_.uniform();
      case Rate::one:
        return 1;
      case Rate::minus_one:
        return -1;
      case Rate::two:
        return 2;
      case Rate::tiny:
        return 1e-6;
      case Rate::denormal:
        return double(std::numeric_limits<Scalar>::denorm_min());
      case Rate::mixed:
        return this->rate(Rate(random_.bits() % int(Rate::mixed)));
      default:
        return 0;
    }
  }

  void make_inputs() {
    q_ = {c_.keys(), layout(0), false};
    k_ = {c_.keys(), layout(1), false};
    v_ = {c_.values(), layout(2), false};
    fill(q_);
    fill(k_, 0.3);
    fill(v_);
    if (c_.p != P::absent) {
      p_ = {c_.p_shape(), layout(3), false};
      fill(p_, 0.3);
    }
    const auto gate = [&](Gate& gate, int i, bool absent, const auto& value) {
      if (absent) return;
      gate = {c_.gates(), layout(i), false};
      const std::size_t reset = gate.empty() ? 0 : random_.bits() % std::size_t(c_.T);
      gate.for_each([&](std::size_t at, Scalar& x) {
        x = Scalar(value(at / std::size_t(c_.HV) % std::size_t(c_.T) == reset));
      });
    };
    gate(log_alpha_, 4, c_.log_alpha == Level::absent, [&](bool at) { return level(c_.log_alpha, at); });
    gate(log_mu_, 5, c_.log_mu == Level::absent, [&](bool at) { return level(c_.log_mu, at); });
    gate(beta_, 6, c_.beta == Rate::absent, [&](bool) { return rate(c_.beta); });
    gate(eta_, 7, c_.eta == Rate::absent, [&](bool) { return rate(c_.eta); });
    const auto state = [&](State& state, int i, bool present, bool in_place) {
      if (!present) return;
      state = {c_.state_shape(), layout(i, !in_place), in_place};
      fill(state);
    };
    state(S0_, 8, c_.initial_S, c_.final_S == Final::in_place);
    state(M0_, 9, c_.initial_M, c_.final_M == Final::in_place);
    in_ = {.q = q_.template view<TokenView<Storage>>(),
           .k = k_.template view<TokenView<Storage>>(),
           .v = v_.template view<TokenView<Storage>>(),
           .p = p_.template view<TokenView<Storage>>(),
           .log_alpha = log_alpha_.template view<GateView<Scalar>>(),
           .log_mu = log_mu_.template view<GateView<Scalar>>(),
           .beta = beta_.template view<GateView<Scalar>>(),
           .eta = eta_.template view<GateView<Scalar>>(),
           .initial_S = S0_.template view<StateView<Scalar>>(),
           .initial_M = M0_.template view<StateView<Scalar>>()};
    if (c_.kind == Kind::step) in_.initial_S = in_.initial_M = {};
    x_ = {q_.template get<Scalar>(),
          k_.template get<Scalar>(),
          v_.template get<Scalar>(),
          p_.template get<Scalar>(),
          log_alpha_.template get<Scalar>(),
          log_mu_.template get<Scalar>(),
          beta_.template get<Scalar>(),
          eta_.template get<Scalar>(),
          S0_.template get<Scalar>(),
          M0_.template get<Scalar>(),
          c_.cu_seqlens,
          {}};
    if (c_.scale) x_.scale = Scalar(*c_.scale);
  }

  // What is to be assigned is NaN before.
  template <class Buffer>
  static void make(Buffer& to, const std::vector<Index>& shape, const Layout& layout) {
    to = {shape, layout, true};
    to.for_each(
        [](std::size_t, auto& x) { x = std::numeric_limits<std::decay_t<decltype(x)>>::quiet_NaN(); });
  }

  void make_outputs() {
    make(o_, c_.values(), layout(10, false));
    const auto state = [&](State& apart, State& initial, int i, Final how) -> StateView<Scalar> {
      if (how == Final::absent) return {};
      if (how == Final::in_place) return initial.template view<StateView<Scalar>>();
      make(apart, c_.state_shape(), layout(i, false));
      return apart.template view<StateView<Scalar>>();
    };
    out_.o = o_.template view<TokenView<Storage>>();
    out_.final_S = state(S_, S0_, 11, c_.final_S);
    out_.final_M = state(M_, M0_, 12, c_.final_M);
  }

  void make_gradients() {
    const auto upstream = [&](auto& to, const std::vector<Index>& shape, int i, bool in_place) {
      if (~c_.upstream >> i & 1) return;
      to = {shape, layout(13 + i, !in_place), in_place};
      fill(to);
    };
    upstream(do_, c_.values(), 0, false);
    upstream(dS_, c_.state_shape(), 1, c_.in_place);
    upstream(dM_, c_.state_shape(), 2, c_.in_place);
    dy_ = {.do_ = do_.template view<TokenView<Storage>>(),
           .dfinal_S = dS_.template view<StateView<Scalar>>(),
           .dfinal_M = dM_.template view<StateView<Scalar>>()};
    upstream_ = {do_.template get<Scalar>(), dS_.template get<Scalar>(), dM_.template get<Scalar>()};

    int i = 0;
    const auto wanted = [&](auto& to, const std::vector<Index>& shape, bool input) {
      const int bit = i++;
      if (!input || (~c_.wanted >> bit & 1)) return;
      make(to, shape, layout(16 + bit, false));
      if (c_.accumulate)
        to.for_each([&](std::size_t, auto& x) { x = std::decay_t<decltype(x)>(Scalar(random_.normal())); });
    };
    wanted(dq_, c_.keys(), true);
    wanted(dk_, c_.keys(), true);
    wanted(dv_, c_.values(), true);
    wanted(dp_, c_.p_shape(), p_.present());
    wanted(dlog_alpha_, c_.gates(), log_alpha_.present());
    wanted(dlog_mu_, c_.gates(), log_mu_.present());
    wanted(dbeta_, c_.gates(), beta_.present());
    wanted(deta_, c_.gates(), eta_.present());
    const bool S_in_place = c_.in_place && dS_.present(), M_in_place = c_.in_place && dM_.present();
    wanted(dS0_, c_.state_shape(), !S_in_place);
    wanted(dM0_, c_.state_shape(), !M_in_place);
    dx_ = {.dq = dq_.template view<TokenView<Storage>>(),
           .dk = dk_.template view<TokenView<Storage>>(),
           .dv = dv_.template view<TokenView<Storage>>(),
           .dp = dp_.template view<TokenView<Storage>>(),
           .dlog_alpha = dlog_alpha_.template view<GateView<Scalar>>(),
           .dlog_mu = dlog_mu_.template view<GateView<Scalar>>(),
           .dbeta = dbeta_.template view<GateView<Scalar>>(),
           .deta = deta_.template view<GateView<Scalar>>(),
           .dinitial_S = (S_in_place ? dS_ : dS0_).template view<StateView<Scalar>>(),
           .dinitial_M = (M_in_place ? dM_ : dM0_).template view<StateView<Scalar>>(),
           .accumulate = c_.accumulate};
  }

  // visit(name, buffer, is it written to): everything that the call can reach.
  template <class Visit>
  void for_each(const Visit& visit) {
    const bool training = c_.kind == Kind::training;
    visit("q", q_, false);
    visit("k", k_, false);
    visit("v", v_, false);
    visit("p", p_, false);
    visit("log_alpha", log_alpha_, false);
    visit("log_mu", log_mu_, false);
    visit("beta", beta_, false);
    visit("eta", eta_, false);
    visit("initial_S", S0_, c_.final_S == Final::in_place);
    visit("initial_M", M0_, c_.final_M == Final::in_place);
    visit("o", o_, true);
    visit("final_S", S_, true);
    visit("final_M", M_, true);
    if (!training) return;
    visit("do_", do_, false);
    visit("dfinal_S", dS_, c_.in_place);
    visit("dfinal_M", dM_, c_.in_place);
    for_each_gradient([&](const char* name, auto& buffer, auto) { visit(name, buffer, true); });
  }
  // visit(name, buffer, its member of Gradients)
  template <class Visit>
  void for_each_gradient(const Visit& visit) {
    using G = Gradients<Scalar>;
    visit("dq", dq_, &G::dq);
    visit("dk", dk_, &G::dk);
    visit("dv", dv_, &G::dv);
    visit("dp", dp_, &G::dp);
    visit("dlog_alpha", dlog_alpha_, &G::dlog_alpha);
    visit("dlog_mu", dlog_mu_, &G::dlog_mu);
    visit("dbeta", dbeta_, &G::dbeta);
    visit("deta", deta_, &G::deta);
    visit("dinitial_S", dS0_, &G::dinitial_S);
    visit("dinitial_M", dM0_, &G::dinitial_M);
  }

  // ---- the calls

  void forward() {
    if (c_.kind == Kind::step)
      momentum_delta::step(in_, out_.final_S, out_.final_M, out_.o, options_);
    else if (c_.kind == Kind::training)
      momentum_delta::forward(in_, out_, saved_, options_);
    else
      momentum_delta::forward(in_, out_, options_);
  }
  void backward() { momentum_delta::backward(in_, saved_, dy_, dx_, backward_options_); }

  // The same call on dense arrays of Scalar, by the calling thread, in memory of its own: what everything but
  // the numbers and the form is to make no difference to.
  std::pair<Results<Scalar>, Gradients<Scalar>> run_plain() {
    Options options = options_, backward_options = backward_options_;
    options.executor = backward_options.executor = nullptr;
    options.workspace = backward_options.workspace = nullptr;
    Results<Scalar> y{examples::unwritten<Scalar>(x_.v.shape), examples::unwritten<Scalar>(x_.state_shape()),
                      examples::unwritten<Scalar>(x_.state_shape())};
    Gradients<Scalar> dx;
    if (c_.kind == Kind::step) {
      y.final_S = x_.initial_S;
      y.final_M = x_.initial_M;
      Inputs<Scalar> x = x_.inputs();
      x.initial_S = x.initial_M = {};
      const Outputs<Scalar> out = y.outputs();
      momentum_delta::step(x, out.final_S, out.final_M, out.o, options);
    } else if (c_.kind == Kind::forward) {
      momentum_delta::forward(x_.inputs(), y.outputs(), options);
    } else {
      Saved<Scalar> saved(c_.interval, c_.keep_u);
      momentum_delta::forward(x_.inputs(), y.outputs(), saved, options);
      Gradients<Scalar>::for_each(
          [&](const char*, auto get, auto get_input) { get(dx).shape = get_input(x_).shape; });
      dx.dinitial_S.shape = dx.dinitial_M.shape = x_.state_shape();
      Gradients<Scalar>::for_each([&](const char*, auto get, auto) {
        if (!get(dx).absent()) get(dx) = examples::unwritten<Scalar>(get(dx).shape);
      });
      momentum_delta::backward(x_.inputs(), saved, upstream_.views(), dx.views(), backward_options);
    }
    if (sabotage_ == Sabotage::result)
      for (Scalar& value : y.final_S.values) value *= Scalar(1 + 1e-3);
    if (sabotage_ == Sabotage::gradient)
      for (Scalar& value : dx.dv.values) value = -value;
    return {y, dx};
  }

  // ---- what is to hold

  void check_backward(const Gradients<Scalar>& plain) {
    check_gradients(plain);
    if (c_.in_place) {
      same("dinitial_S in place", dS_, plain.dinitial_S);
      same("dinitial_M in place", dM_, plain.dinitial_M);
    }
  }

  void compare(const Results<Scalar>& y, const Gradients<Scalar>& dx) {
    Problem<double> x = x_.template as<double>();
    if (c_.K == 0) x.scale = 1;  // of nothing
    const Results<long double> exact = test::oracle(x), sizes = test::oracle(uncancelled(x));
    const Results<Scalar> r = test::definition(x_);
    const double units = 8 + decay_rounding(c_, x);
    const auto within = [&](const std::string& name, const auto& a, const auto& definition, const auto& e,
                            const auto& size) {
      const double ratio = error_ratio<Scalar>(c_, units, a, definition, e, size);
      if (!(ratio <= 1)) fail(c_, name + " has " + std::to_string(ratio) + " of the error that it may have");
    };
    within("o", y.o, r.o, exact.o, sizes.o);
    within("final_S", y.final_S, r.final_S, exact.final_S, sizes.final_S);
    within("final_M", y.final_M, r.final_M, exact.final_M, sizes.final_M);
    if (c_.kind != Kind::training) return;

    const Upstream<double> dy = upstream_.template as<double>();
    Upstream<double> dy_sizes = dy;
    for (auto* a : {&dy_sizes.do_, &dy_sizes.dfinal_S, &dy_sizes.dfinal_M})
      for (double& value : a->values) value = std::abs(value);
    const Gradients<long double> g = test::oracle_backward(x, dy);
    Gradients<long double> g_sizes = test::oracle_backward(uncancelled(x), dy_sizes);
    if (x_.p.absent())
      for (std::size_t i = 0; i < g_sizes.dk.values.size(); ++i)
        g_sizes.dk.values[i] = std::abs(g_sizes.dk.values[i]) + std::abs(g_sizes.dp.values[i]);
    Options recurrent = test::recurrent();
    recurrent.allow_positive_log_gates = c_.allows_positive();
    const Gradients<Scalar> dr = examples::run_backward(x_, upstream_, recurrent);
    double worst = 0, worst_recurrent = 0;  // elements of gates
    Gradients<Scalar>::for_each([&](const std::string& name, auto get, auto) {
      if (get(g).absent()) return;
      within(name, get(dx), get(dr), get(g), get(g_sizes));
      if (get(g).shape.size() != 3) return;
      for (std::size_t i = 0; i < get(g).values.size(); ++i) {
        const long double e = get(g).values[i], size = std::max(std::abs(get(g_sizes).values[i]), 1e-30L);
        worst = std::max(worst, double(std::abs(get(dx).values[i] - e) / size));
        worst_recurrent = std::max(worst_recurrent, double(std::abs(get(dr).values[i] - e) / size));
      }
    });
    if (!(worst <= 4 * worst_recurrent + units * double(std::numeric_limits<Scalar>::epsilon())))
      fail(c_, "an element of a gate's gradient has an error of " + std::to_string(worst) +
                   ", the recurrence's worst has " + std::to_string(worst_recurrent));
  }

  // ---- illegal calls

  bool chosen(const char* name) const {
    return c_.illegal >= 0 && name == std::string_view(illegal_names[c_.illegal]);
  }

  // A number for a present gate, positive or a rate, where it has elements.
  bool spoil_gate(bool log_gates_only, double log_gate, double rate) {
    for (Gate* gate : {&log_alpha_, &log_mu_, &beta_, &eta_}) {
      const bool log = gate == &log_alpha_ || gate == &log_mu_;
      if (gate->empty() || (log_gates_only && !log)) continue;
      const std::size_t at = random_.bits() % std::size_t(c_.B * c_.T * c_.HV);
      gate->for_each([&](std::size_t i, Scalar& x) {
        if (i == at) x = Scalar(log ? log_gate : rate);
      });
      return true;
    }
    return false;
  }
  bool spoil_offsets(std::vector<Index> offsets) {
    offsets_ = std::move(offsets);
    in_.cu_seqlens = offsets_;
    return true;
  }

  // Returns whether forward() or step() must refuse the call now.
  bool spoil_forward() {
    const bool step = c_.kind == Kind::step;
    const double inf = test::infinity, nan = std::numeric_limits<double>::quiet_NaN();
    const bool odd = c_.seed % 2 != 0;
    const Index T = c_.T, least = std::numeric_limits<Index>::min(), most = std::numeric_limits<Index>::max();
    const auto remove = [](auto& view) {
      view = {};
      return true;
    };
    if (chosen("q missing")) return remove(in_.q);
    if (chosen("v missing")) return remove(in_.v);
    if (chosen("k shape")) return lengthen(in_.k, c_.seed % 4);
    if (chosen("v heads")) return lengthen(in_.v, 2);
    if (chosen("gate shape"))
      return lengthen(in_.log_alpha, 2) || lengthen(in_.beta, 1) || lengthen(in_.eta, 0);
    if (chosen("null data")) return move(in_.v, static_cast<Storage*>(nullptr));
    if (chosen("negative stride")) return T > 1 && (in_.q.stride[1] = odd ? -1 : least, true);
    if (chosen("inner stride")) return c_.V > 1 && (in_.v.stride[3] = odd ? 0 : 2, true);
    if (chosen("negative size")) return in_.q.shape[1] = odd ? -1 : least, true;
    if (chosen("p heads")) return !in_.p.absent() && (in_.p.shape[2] = c_.HK + c_.HV + 1, true);
    if (chosen("p channels")) return lengthen(in_.p, 3);
    if (chosen("o missing")) return remove(out_.o);
    if (chosen("o shape")) return lengthen(out_.o, 3);
    if (chosen("o repeats")) return T > 1 && !o_.empty() && (out_.o.stride[1] = 0, true);
    if (chosen("o shares v")) return move(out_.o, in_.v.data);
    if (chosen("states share")) return !out_.final_S.empty() && move(out_.final_M, out_.final_S.data);
    if (chosen("NaN gate")) return spoil_gate(odd, nan, nan);
    if (chosen("infinite gate")) return spoil_gate(false, inf, odd ? inf : -inf);
    if (chosen("positive gate"))
      return !c_.allows_positive() &&
             spoil_gate(true, odd ? 0.5 : double(std::numeric_limits<Scalar>::denorm_min()), 0);
    if (chosen("scale")) return in_.scale = Scalar(odd ? inf : nan), true;
    if (chosen("chunk size")) return options_.chunk_size = odd ? 0 : least, true;
    if (step) {
      if (chosen("two tokens")) return in_.q.shape[1] = 2, true;
      if (chosen("initial_S in step")) return in_.initial_S = out_.final_S, true;
      if (chosen("S missing")) return remove(out_.final_S);
      if (chosen("chunk size in step")) return options_.chunk_size = 4, true;
      if (chosen("chunk form in step")) return options_.algorithm = Algorithm::chunk, true;
      if (chosen("offsets in step")) return spoil_offsets({0, 1});
      return false;
    }
    if (chosen("offsets of two batches")) return c_.B != 1 && spoil_offsets({0, T});
    if (chosen("first offset")) return spoil_offsets({odd ? 1 : -1, T});
    if (chosen("offsets decrease")) return spoil_offsets({0, T, T - 1, T});
    if (chosen("offset past T")) return spoil_offsets({0, T + 1});
    if (chosen("last offset")) return T > 0 && spoil_offsets({0, T - 1});
    if (chosen("wild offsets")) return spoil_offsets({0, odd ? most : least, odd ? least : most, T});
    if (chosen("initial_S shape")) return lengthen(in_.initial_S, 0);
    if (chosen("final_M shape")) return lengthen(out_.final_M, c_.seed % 4);
    if (chosen("final_S shifted"))
      return c_.final_S == Final::in_place && c_.V > 1 && move(out_.final_S, out_.final_S.data + 1);
    return false;
  }

  // The same for backward().
  bool spoil_backward() {
    const auto another = [&](const test::Shape& shape) {  // forward pass
      const Problem<Scalar> x = test::random_problem(1, shape).template as<Scalar>();
      Results<Scalar> y{examples::zeros<Scalar>(x.v.shape), {}, {}};
      momentum_delta::forward(x.inputs(), y.outputs(), saved_);
      return true;
    };
    if (chosen("saved is empty")) return saved_ = Saved<Scalar>(c_.interval, c_.keep_u), true;
    if (chosen("saved was moved from")) return moved_ = std::move(saved_), true;
    if (chosen("saved of other T"))
      return another({.B = c_.B, .T = c_.T + 1, .HK = c_.HK, .HV = c_.HV, .K = c_.K, .V = c_.V});
    if (chosen("saved of other V"))
      return another({.B = c_.B, .T = c_.T, .HK = c_.HK, .HV = c_.HV, .K = c_.K, .V = c_.V + 1});
    if (chosen("other chunk size")) {
      const Index longest = momentum_delta::detail::sizes_of(in_).longest;
      backward_options_.chunk_size = saved_.chunk_size() + 1;
      return saved_.chunk_size() < longest;
    }
    if (chosen("dq shape")) return lengthen(dx_.dq, c_.seed % 4);
    if (chosen("gradient of absent input")) {
      if (in_.p.absent()) return dx_.dp = TokenView<Storage>(o_.memory.data(), {1, 1, 1, 1}), true;
      return in_.log_mu.absent() && (dx_.dlog_mu = GateView<Scalar>(S_.memory.data(), {1, 1, 1}), true);
    }
    if (chosen("dv shares v")) return move(dx_.dv, in_.v.data);
    if (chosen("dk shares dq")) return !dx_.dq.empty() && move(dx_.dk, dx_.dq.data);
    if (chosen("accumulated in place")) {
      if (dS_.empty()) return false;
      dx_.dinitial_S = dS_.template view<StateView<Scalar>>();
      return dx_.accumulate = true;
    }
    if (chosen("do shape")) return lengthen(dy_.do_, c_.seed % 4);
    if (chosen("dv repeats")) return c_.T > 1 && !dv_.empty() && (dx_.dv.stride[1] = 0, true);
    if (chosen("dfinal_S shape")) return lengthen(dy_.dfinal_S, c_.seed % 4);
    return false;
  }

  const Call& c_;
  Random random_;
  Tokens<Storage> q_, k_, v_, p_, o_, do_, dq_, dk_, dv_, dp_;
  Gate log_alpha_, log_mu_, beta_, eta_, dlog_alpha_, dlog_mu_, dbeta_, deta_;
  State S0_, M0_, S_, M_, dS_, dM_, dS0_, dM0_;
  std::vector<Index> offsets_;  // wrong ones
  Inputs<Scalar, Storage> in_;
  Outputs<Scalar, Storage> out_;
  OutputGradients<Scalar, Storage> dy_;
  InputGradients<Scalar, Storage> dx_;
  Options options_, backward_options_;
  Saved<Scalar> saved_, moved_;
  Problem<Scalar> x_;          // in_, dense
  Upstream<Scalar> upstream_;  // dy_, dense
};

// Throws Failure if the call that the bytes choose is not as it should be.
inline void check_rule(std::span<const std::uint8_t> bytes, Reached* reached = nullptr,
                       Sabotage sabotage = Sabotage::none) {
  check_call<Rule>(Call(Bytes(bytes)), illegal_names, reached, sabotage);
}

}  // namespace fuzz
