// One call of the selective scan, chosen by a byte string, and all that is to hold of it: see rule.hpp.
#pragma once

#include <sstream>

#include "../support/scan.hpp"
#include "bytes.hpp"
#include "call.hpp"

namespace fuzz {

using momentum_delta::ArrayView;
using momentum_delta::ScanInputGradients;
using momentum_delta::ScanInputs;
using momentum_delta::ScanOptions;
using momentum_delta::ScanOutputGradients;
using momentum_delta::ScanOutputs;
using momentum_delta::ScanSaved;
using momentum_delta::TokenView;
using test::ScanGradients;
using test::ScanProblem;
using test::ScanResults;
using test::ScanUpstream;

enum class Step { usual, tiny, zero, large, wild };          // the lengths dt
enum class Decay { usual, none, tiny, strong, all, mixed };  // A

inline constexpr const char* step_names[] = {"usual", "tiny", "zero", "large", "wild"};
inline constexpr const char* decay_names[] = {"usual", "none", "tiny", "strong", "all", "mixed"};
inline constexpr const char* scan_illegal_names[] = {
    "u missing", "A missing", "delta shape", "groups", "A positive", "A is NaN", "delta infinite",
    "bias infinite", "negative dt", "null data", "negative stride", "last stride", "negative size",
    "out missing", "out shape", "out repeats", "out shares u", "chunk size",
    // forward and backward
    "initial shape", "final shape", "final shifted",
    // backward
    "saved is empty", "saved of other T", "other chunk size", "du shape", "gradient of absent input",
    "dC shares dB", "accumulated in place", "dA shares A", "dA repeats", "dout shape",
    // step
    "two tokens", "initial state in step", "state missing", "chunk form in step"};
inline constexpr int scan_illegal_count = int(std::size(scan_illegal_names));

struct ScanCall {
  Kind kind;
  Type type;
  Index B, T, G, D, N;
  bool skip, gate, bias, initial, softplus;  // is D, z, delta_bias, initial_state present; delta_softplus
  Final final_state;
  Step step;
  Decay decay;
  Algorithm algorithm;
  std::optional<Index> chunk_size;
  bool backward_chunk_size;
  int threads;
  bool workspace;
  unsigned upstream, wanted;
  bool accumulate, in_place;
  int illegal;
  std::uint64_t seed;
  std::array<std::uint8_t, 22> layouts;

  explicit ScanCall(Bytes bytes) {
    static constexpr std::array<Index, 16> sizes = {3, 1, 2, 4, 5, 7, 8, 9, 0, 15, 16, 17, 31, 32, 33, 40};
    kind = Kind(bytes.below(3));
    type = Type(bytes.below(4));
    illegal = bytes.byte() % 4 == 3 ? bytes.byte() % scan_illegal_count : -1;
    seed = bytes.word(2);
    B = bytes.pick<Index, 16>({1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0});
    T = bytes.pick(sizes);
    if (kind == Kind::step) T = 1;
    G = 1 + bytes.below(3);
    D = G * bytes.pick<Index, 16>({3, 1, 2, 4, 5, 7, 8, 9, 0, 15, 16, 17, 1, 2, 3, 33});
    N = bytes.pick<Index, 16>({4, 1, 2, 3, 5, 7, 8, 9, 16, 17, 16, 15, 0, 1, 2, 3});
    while (B * T * D * N > 10000) (T > 8 ? T : N) /= 2;  // the oracle is to take a few milliseconds
    if (D == 0) B = std::max<Index>(B, 1);               // a dense array without any sizes is an absent one
    if (D == 0) N = std::max<Index>(N, 1);
    const std::uint8_t present = bytes.byte();
    skip = present % 2 == 0;
    gate = present / 2 % 2 == 0;
    bias = present / 4 % 2 == 0;
    initial = present / 8 % 2 == 0;
    softplus = present / 16 % 4 != 1;
    final_state = Final(bytes.below(3));
    if (kind == Kind::step) {
      initial = true;
      final_state = Final::in_place;
    }
    if (!initial && final_state == Final::in_place) final_state = Final::apart;
    step = Step(bytes.below(int(std::size(step_names))));
    if (step == Step::wild && !softplus) step = Step::large;
    decay = Decay(bytes.below(int(std::size(decay_names))));
    // A dt that underflows, times the lowest number, which A = -inf counts as, may be anything.
    if (step == Step::wild && (decay == Decay::all || decay == Decay::mixed)) step = Step::large;
    algorithm = Algorithm(bytes.below(3));
    chunk_size = Index(bytes.pick<int, 8>({4, 1, 2, 3, 7, 16, 33, 1000}));
    if (bytes.below(4) == 3) chunk_size.reset();
    backward_chunk_size = bytes.flag();
    if (kind == Kind::step) {
      if (algorithm == Algorithm::chunk) algorithm = Algorithm::automatic;
      chunk_size.reset();
    }
    threads = bytes.below(4);
    workspace = bytes.flag();
    upstream = ~unsigned(bytes.byte()) & 3;
    wanted = ~unsigned(bytes.word(2)) & 0x1ff;
    const std::uint8_t how = bytes.byte();
    accumulate = how % 4 == 1;
    in_place = how % 4 == 2;
    for (std::uint8_t& layout : layouts) layout = bytes.byte();
  }

  template <class Visit>
  void for_each_class(const Visit& visit) const {
    visit("kind", kind_names[int(kind)]);
    visit("type", type_names[int(type)]);
    visit("algorithm", algorithm_names[int(algorithm)]);
    visit("D", skip ? "present" : "absent");
    visit("z", gate ? "present" : "absent");
    visit("delta_bias", bias ? "present" : "absent");
    visit("initial_state", initial ? "present" : "absent");
    visit("delta_softplus", softplus ? "true" : "false");
    visit("final_state", final_names[int(final_state)]);
    visit("dt", step_names[int(step)]);
    visit("A", decay_names[int(decay)]);
    visit("chunk size", !chunk_size ? "automatic" : *chunk_size > T ? "larger than T" : "at most T");
    visit("executor", std::to_string(threads));
    visit("workspace", workspace ? "given" : "own");
    visit("sizes", B * T * D * N == 0 ? "with a zero" : "positive");
    if (kind != Kind::training) return;
    visit("gradients", accumulate ? "accumulated" : in_place ? "in place" : "apart");
    for (int i = 0; i < 2; ++i)
      visit("upstream " + std::to_string(i), upstream >> i & 1 ? "given" : "absent");
    for (int i = 0; i < 9; ++i) visit("gradient " + std::to_string(i), wanted >> i & 1 ? "wanted" : "not");
  }

  std::string text() const {
    std::ostringstream out;
    out << "scan B " << B << " T " << T << " D " << D << " G " << G << " N " << N;
    for_each_class([&](const auto& what, const auto& which) { out << ", " << what << " " << which; });
    if (chunk_size) out << ", chunk_size " << *chunk_size;
    if (illegal >= 0) out << ", illegal: " << scan_illegal_names[illegal];
    out << ", seed " << seed << ", layouts";
    for (const std::uint8_t layout : layouts) out << " " << int(layout);
    return out.str();
  }
};

[[noreturn]] inline void fail(const ScanCall& call, const std::string& message) {
  throw Failure(message + ": " + call.text());
}

// How large the sums are before anything in them cancels, as in rule.hpp: of results, and of gradients. Of
// ddelta's two sums, gh B u and gh A h, the oracle has the difference; the first is u du / dt without D.
inline ScanProblem<double> uncancelled(ScanProblem<double> x) {
  for (auto* a : {&x.u, &x.B, &x.C, &x.D, &x.z, &x.initial_state})
    for (double& value : a->values) value = std::abs(value);
  return x;
}
inline ScanGradients<long double> gradient_sizes(ScanProblem<double> x, ScanUpstream<double> dy) {
  x = uncancelled(x);
  for (auto* a : {&dy.dout, &dy.dfinal_state})
    for (double& value : a->values) value = std::abs(value);
  ScanGradients<long double> sizes = test::oracle_backward(x, dy);
  ScanProblem<double> without_D = x;
  without_D.D = {};
  const ScanGradients<long double> g = test::oracle_backward(without_D, dy);
  const Index D = x.u.shape[2], rows = x.u.shape[0] * x.u.shape[1];
  for (long double& value : sizes.ddelta_bias.values) value = 0;
  for (Index i = 0; i < rows * D; ++i) {
    const std::size_t at = std::size_t(i), d = std::size_t(i % D);
    const test::ScanChannel c{x, i / D / std::max<Index>(x.u.shape[1], 1), Index(d)};
    const Index t = i / D % x.u.shape[1];
    const long double dt = c.dt(t), slope = x.delta_softplus ? c.sigmoid(c.step(t)) : 1;
    if (dt == 0) continue;  // the slope is 0 too, or there are no gradients to compare
    sizes.ddelta.values[at] = 2 * g.du.values[at] * x.u.values[at] / dt * slope - g.ddelta.values[at];
    if (!sizes.ddelta_bias.absent()) sizes.ddelta_bias.values[d] += sizes.ddelta.values[at];
  }
  return sizes;
}

// How many eps of its size a result may be off by. Each token multiplies a state by a decay that is off by 3
// eps, plus the rounding of its exponent dt A and of dt: softplus(s) at s < 0 is off by the |s| eps of s.
// Decays below e^-69 = 1e-30 do not count. Sums are over N states, the channels of a group, and all tokens.
inline double scan_units(const ScanCall& c, const ScanProblem<double>& x) {
  double step = 0, exponents = 0;
  for (Index b = 0; b < c.B; ++b) {
    for (Index d = 0; d < c.D; ++d) {
      const test::ScanChannel channel{x, b, d};
      for (Index n = 0; n < std::max<Index>(c.N, 1); ++n) {
        double sum = 0;
        for (Index t = 0; t < c.T; ++t) {
          const double s = double(channel.step(t));
          if (c.softplus && s < 0) step = std::max(step, std::min(-s, 104.));
          if (c.N > 0) sum += std::min(double(channel.dt(t) * -channel.A(n)), 69.);
        }
        exponents = std::max(exponents, std::min(sum, 69.));
      }
    }
  }
  return 16 + 4 * double(c.T) + double(c.N + c.D + c.B * c.T) + (4 + step) * (1 + exponents);
}

template <class Scalar, class Storage>
class Scan : Checks<Scan<Scalar, Storage>> {
 public:
  explicit Scan(const ScanCall& c, Sabotage sabotage = Sabotage::none)
      : Base(sabotage), c_(c), random_(c.seed) {
    make_inputs();
    make_outputs();
    if (c.kind == Kind::training) make_gradients();
    options_ = {.algorithm = c.algorithm,
                .chunk_size = c.chunk_size,
                .executor = executor(c.threads),
                .workspace = c.workspace ? workspace() : nullptr};
    backward_options_ = options_;
    if (!c.backward_chunk_size) backward_options_.chunk_size.reset();
  }

  bool check() {
    if (c_.illegal >= 0 && spoil_forward()) {
      refused(c_.kind == Kind::step ? "scan_step" : "scan_forward", [&] { forward(); });
      if (!saved_.empty()) fail(c_, "a refused call filled saved");
      return true;
    }
    const auto [y, dx] = run_plain();
    remember();
    const std::vector<Scalar> initial = initial_.memory;
    forward();
    if (sabotage_ == Sabotage::value)
      out_.for_each([](std::size_t, Storage& x) { x = Storage(Scalar(x) + 1); });
    check_memory();
    same("out", out_, y.out);
    same("final_state", c_.final_state == Final::in_place ? initial_ : final_, y.final_state);
    if (c_.kind == Kind::training) {
      initial_.memory = initial;  // scan_backward() is to see what scan_forward() saw
      if (c_.illegal >= 0 && spoil_backward()) {
        refused("scan_backward", [&] { backward(); });
        return true;
      }
      check_backward(dx);
    }
    compare(y, dx);
    return false;
  }

 private:
  using Base = Checks<Scan>;
  friend Base;
  using Base::check_gradients, Base::check_memory, Base::refused, Base::remember, Base::sabotage_, Base::same;

  template <class T, std::size_t Rank>
  using View = std::conditional_t<Rank == 4, TokenView<T>, ArrayView<T, Rank>>;
  using Shape = std::vector<Index>;

  Layout layout(int i, bool can_repeat = true) const {
    Layout layout(c_.layouts[std::size_t(i)]);
    if (!can_repeat) layout.broadcast = -1;
    return layout;
  }
  template <class T, std::size_t Rank, class Value>
  void make(Buffer<T, Rank>& to, const Shape& shape, int i, bool output, const Value& value) {
    to = {shape, layout(i, !output), output, true};
    to.for_each([&](std::size_t, T& x) { x = static_cast<T>(Scalar(value())); });
  }
  template <class T, std::size_t Rank>
  static View<T, Rank> view(Buffer<T, Rank>& buffer) {
    return buffer.template view<View<T, Rank>>();
  }

  double delta() {
    const double log_dt = random_.uniform(-5, 0);  // softplus(s) = e^s, nearly
    switch (c_.step) {
      case Step::tiny:
        return c_.softplus ? -30 * random_.uniform() : 1e-4;
      case Step::zero:
        return c_.softplus ? -6e4 : 0;
      case Step::large:
        return 1e3 * random_.uniform();
      case Step::wild:
        return std::array{-6e4, -200., -90., 0., 90., 1e4}[random_.bits() % 6];
      default:
        return c_.softplus ? log_dt : std::exp(log_dt);
    }
  }
  double A() {
    constexpr double inf = test::infinity;
    switch (c_.decay) {
      case Decay::none:
        return -0.;
      case Decay::tiny:
        return -1e-30;
      case Decay::strong:
        return -1e4;
      case Decay::all:
        return -inf;
      case Decay::mixed:
        return std::array{0., -1e-30, -1., -20., -1e4, -inf}[random_.bits() % 6];
      default:
        return -16 * random_.uniform();
    }
  }

  void make_inputs() {
    const auto normal = [&] { return random_.normal(); };
    const Shape tokens{c_.B, c_.T, c_.D}, groups{c_.B, c_.T, c_.G, c_.N};
    make(u_, tokens, 0, false, normal);
    make(delta_, tokens, 1, false, [&] { return delta(); });
    make(A_, {c_.D, c_.N}, 2, false, [&] { return A(); });
    make(B_, groups, 3, false, normal);
    make(C_, groups, 4, false, normal);
    if (c_.skip) make(D_, {c_.D}, 5, false, normal);
    if (c_.gate) make(z_, tokens, 6, false, normal);
    if (c_.bias) make(bias_, {c_.D}, 7, false, [&] { return c_.softplus ? normal() : random_.uniform(); });
    if (c_.initial) make(initial_, {c_.B, c_.D, c_.N}, 8, c_.final_state == Final::in_place, normal);
    in_ = {.u = view(u_),
           .delta = view(delta_),
           .A = view(A_),
           .B = view(B_),
           .C = view(C_),
           .D = view(D_),
           .z = view(z_),
           .delta_bias = view(bias_),
           .initial_state = view(initial_),
           .delta_softplus = c_.softplus};
    if (c_.kind == Kind::step) in_.initial_state = {};
    x_ = {u_.template get<Scalar>(),       delta_.template get<Scalar>(),
          A_.template get<Scalar>(),       B_.template get<Scalar>(),
          C_.template get<Scalar>(),       D_.template get<Scalar>(),
          z_.template get<Scalar>(),       bias_.template get<Scalar>(),
          initial_.template get<Scalar>(), c_.softplus};
  }

  void make_outputs() {
    const auto unwritten = [] { return std::numeric_limits<double>::quiet_NaN(); };
    make(out_, {c_.B, c_.T, c_.D}, 9, true, unwritten);
    if (c_.final_state == Final::apart) make(final_, {c_.B, c_.D, c_.N}, 10, true, unwritten);
    y_ = {.out = view(out_), .final_state = view(c_.final_state == Final::in_place ? initial_ : final_)};
  }

  void make_gradients() {
    const auto normal = [&] { return random_.normal(); };
    const auto before = [&] { return c_.accumulate ? random_.normal() : std::nan(""); };
    const Shape tokens{c_.B, c_.T, c_.D}, groups{c_.B, c_.T, c_.G, c_.N}, state{c_.B, c_.D, c_.N};
    if (c_.upstream & 1) make(dout_, tokens, 11, false, normal);
    if (c_.upstream & 2) make(dfinal_, state, 12, c_.in_place, normal);
    dy_ = {.dout = view(dout_), .dfinal_state = view(dfinal_)};
    upstream_ = {dout_.template get<Scalar>(), dfinal_.template get<Scalar>()};
    int i = 0;
    const auto wanted = [&](auto& to, const Shape& shape, bool input) {
      const int bit = i++;
      if (input && (c_.wanted >> bit & 1)) make(to, shape, 13 + bit, true, before);
    };
    const bool in_place = c_.in_place && dfinal_.present();
    wanted(du_, tokens, true);
    wanted(ddelta_, tokens, true);
    wanted(dA_, {c_.D, c_.N}, true);
    wanted(dB_, groups, true);
    wanted(dC_, groups, true);
    wanted(dD_, {c_.D}, c_.skip);
    wanted(dz_, tokens, c_.gate);
    wanted(dbias_, {c_.D}, c_.bias);
    wanted(dinitial_, state, !in_place);
    dx_ = {.du = view(du_),
           .ddelta = view(ddelta_),
           .dA = view(dA_),
           .dB = view(dB_),
           .dC = view(dC_),
           .dD = view(dD_),
           .dz = view(dz_),
           .ddelta_bias = view(dbias_),
           .dinitial_state = view(in_place ? dfinal_ : dinitial_),
           .accumulate = c_.accumulate};
  }

  template <class Visit>
  void for_each(const Visit& visit) {
    visit("u", u_, false);
    visit("delta", delta_, false);
    visit("A", A_, false);
    visit("B", B_, false);
    visit("C", C_, false);
    visit("D", D_, false);
    visit("z", z_, false);
    visit("delta_bias", bias_, false);
    visit("initial_state", initial_, c_.final_state == Final::in_place);
    visit("out", out_, true);
    visit("final_state", final_, true);
    visit("dout", dout_, false);
    visit("dfinal_state", dfinal_, c_.in_place);
    for_each_gradient([&](const char* name, auto& buffer, auto) { visit(name, buffer, true); });
  }
  template <class Visit>
  void for_each_gradient(const Visit& visit) {
    using G = ScanGradients<Scalar>;
    visit("du", du_, &G::du);
    visit("ddelta", ddelta_, &G::ddelta);
    visit("dA", dA_, &G::dA);
    visit("dB", dB_, &G::dB);
    visit("dC", dC_, &G::dC);
    visit("dD", dD_, &G::dD);
    visit("dz", dz_, &G::dz);
    visit("ddelta_bias", dbias_, &G::ddelta_bias);
    visit("dinitial_state", dinitial_, &G::dinitial_state);
  }

  void forward() {
    if (c_.kind == Kind::step)
      momentum_delta::scan_step(in_, y_.final_state, y_.out, options_);
    else if (c_.kind == Kind::training)
      momentum_delta::scan_forward(in_, y_, saved_, options_);
    else
      momentum_delta::scan_forward(in_, y_, options_);
  }
  void backward() { momentum_delta::scan_backward(in_, saved_, dy_, dx_, backward_options_); }

  // The same call on dense arrays of Scalar, by the calling thread, in memory of its own.
  std::pair<ScanResults<Scalar>, ScanGradients<Scalar>> run_plain() {
    const ScanOptions options{.algorithm = c_.algorithm, .chunk_size = c_.chunk_size};
    ScanResults<Scalar> y{examples::unwritten<Scalar>(x_.u.shape),
                          examples::unwritten<Scalar>(x_.state_shape())};
    ScanGradients<Scalar> dx;
    if (c_.kind == Kind::step) {
      y.final_state = x_.initial_state;
      ScanInputs<Scalar> x = x_.inputs();
      x.initial_state = {};
      const ScanOutputs<Scalar> out = y.outputs();
      momentum_delta::scan_step(x, out.final_state, out.out, options);
    } else if (c_.kind == Kind::forward) {
      momentum_delta::scan_forward(x_.inputs(), y.outputs(), options);
    } else {
      ScanSaved<Scalar> saved;
      momentum_delta::scan_forward(x_.inputs(), y.outputs(), saved, options);
      dx = examples::unwritten_gradients(x_);
      momentum_delta::scan_backward(x_.inputs(), saved, upstream_.views(), dx.views(), options);
    }
    if (sabotage_ == Sabotage::result)
      for (Scalar& value : y.out.values) value *= Scalar(1 + 1e-3);
    if (sabotage_ == Sabotage::gradient)
      for (Scalar& value : dx.ddelta.values) value = -value;
    return {y, dx};
  }

  void check_backward(const ScanGradients<Scalar>& plain) {
    check_gradients(plain);
    if (c_.in_place) same("dinitial_state in place", dfinal_, plain.dinitial_state);
  }

  void compare(const ScanResults<Scalar>& y, const ScanGradients<Scalar>& dx) {
    const ScanProblem<double> x = x_.template as<double>();
    const double units = scan_units(c_, x);
    const auto within = [&](const std::string& name, const Array<Scalar>& a, const auto& e,
                            const auto& size) {
      const long double error = rms(difference(a, e)), allowed = std::max(rms(size), 1e-30L) * units *
                                                                 std::numeric_limits<Scalar>::epsilon();
      if (!(error <= allowed))
        fail(c_, name + " has " + std::to_string(double(error / allowed)) + " of the error that it may have");
    };
    const ScanResults<long double> exact = test::oracle(x), sizes = test::oracle(uncancelled(x));
    within("out", y.out, exact.out, sizes.out);
    within("final_state", y.final_state, exact.final_state, sizes.final_state);
    if (c_.kind != Kind::training) return;
    const ScanUpstream<double> dy = upstream_.template as<double>();
    const ScanGradients<long double> g = test::oracle_backward(x, dy), g_sizes = gradient_sizes(x, dy);
    ScanGradients<Scalar>::for_each([&](const std::string& name, auto get, auto) {
      if (get(dx).absent() || (name.starts_with("ddelta") && c_.step == Step::zero && !c_.softplus)) return;
      within(name, get(dx), get(g), get(g_sizes));
    });
  }

  bool chosen(const char* name) const {
    return c_.illegal >= 0 && name == std::string_view(scan_illegal_names[c_.illegal]);
  }
  template <class T, std::size_t Rank>
  bool put(Buffer<T, Rank>& buffer, double value) {
    if (buffer.empty()) return false;
    buffer.for_each([&](std::size_t i, T& x) {
      if (i == 0) x = static_cast<T>(Scalar(value));
    });
    return true;
  }

  bool spoil_forward() {
    const double inf = test::infinity, nan = std::nan("");
    const bool odd = c_.seed % 2 != 0, step = c_.kind == Kind::step;
    const auto remove = [](auto& view) {
      view = {};
      return true;
    };
    if (chosen("u missing")) return remove(in_.u);
    if (chosen("A missing")) return remove(in_.A);
    if (chosen("delta shape")) return lengthen(in_.delta, c_.seed % 3);
    if (chosen("groups")) return in_.B.shape[2] = in_.C.shape[2] = odd ? 0 : c_.D + 1, true;
    if (chosen("A positive")) return put(A_, odd ? 1 : double(std::numeric_limits<Scalar>::denorm_min()));
    if (chosen("A is NaN")) return put(A_, odd ? nan : inf);
    if (chosen("delta infinite")) return put(delta_, odd ? nan : inf);
    if (chosen("bias infinite")) return put(bias_, odd ? nan : -inf);
    if (chosen("negative dt")) return !c_.softplus && put(delta_, -100);
    if (chosen("null data")) return move(in_.u, static_cast<Storage*>(nullptr));
    if (chosen("negative stride")) return c_.T > 1 && (in_.delta.stride[1] = -1, true);
    if (chosen("last stride")) return c_.D > 1 && (in_.u.stride[2] = odd ? 0 : 2, true);
    if (chosen("negative size")) return in_.u.shape[0] = -1, true;
    if (chosen("out missing")) return remove(y_.out);
    if (chosen("out shape")) return lengthen(y_.out, c_.seed % 3);
    if (chosen("out repeats")) return c_.T > 1 && !out_.empty() && (y_.out.stride[1] = 0, true);
    if (chosen("out shares u")) return move(y_.out, in_.u.data);
    if (chosen("chunk size")) return options_.chunk_size = odd ? 0 : -1, true;
    if (step) {
      if (chosen("two tokens")) return in_.u.shape[1] = 2, true;
      if (chosen("initial state in step")) return in_.initial_state = y_.final_state, true;
      if (chosen("state missing")) return remove(y_.final_state);
      if (chosen("chunk form in step")) return options_.algorithm = Algorithm::chunk, true;
      return false;
    }
    if (chosen("initial shape")) return lengthen(in_.initial_state, c_.seed % 3);
    if (chosen("final shape")) return lengthen(y_.final_state, c_.seed % 3);
    if (chosen("final shifted"))
      return c_.final_state == Final::in_place && c_.N > 1 && move(y_.final_state, y_.final_state.data + 1);
    return false;
  }

  bool spoil_backward() {
    if (chosen("saved is empty")) return saved_ = {}, true;
    if (chosen("saved of other T")) {
      const ScanProblem<Scalar> x =
          test::random_scan(1, {.B = c_.B, .T = c_.T + 1, .D = c_.D, .G = c_.G, .N = c_.N})
              .template as<Scalar>();
      ScanResults<Scalar> y{examples::zeros<Scalar>(x.u.shape), {}};
      momentum_delta::scan_forward(x.inputs(), y.outputs(), saved_);
      return true;
    }
    if (chosen("other chunk size")) {
      backward_options_.chunk_size = saved_.chunk_size() + 1;
      return saved_.chunk_size() < c_.T;
    }
    if (chosen("du shape")) return lengthen(dx_.du, c_.seed % 3);
    if (chosen("gradient of absent input"))
      return in_.D.absent() && (dx_.dD = ArrayView<Scalar, 1>(A_.memory.data(), {1}), true);
    if (chosen("dC shares dB")) return !dx_.dB.empty() && move(dx_.dC, dx_.dB.data);
    if (chosen("accumulated in place")) {
      if (dfinal_.empty()) return false;
      dx_.dinitial_state = view(dfinal_);
      return dx_.accumulate = true;
    }
    if (chosen("dA shares A")) return move(dx_.dA, in_.A.data);
    if (chosen("dA repeats")) return c_.D > 1 && !dA_.empty() && (dx_.dA.stride[0] = 0, true);
    if (chosen("dout shape")) return lengthen(dy_.dout, c_.seed % 3);
    return false;
  }

  const ScanCall& c_;
  Random random_;
  Buffer<Storage, 3> u_, delta_, z_, out_, dout_, du_, ddelta_, dz_;
  Buffer<Storage, 4> B_, C_, dB_, dC_;
  Buffer<Scalar, 1> D_, bias_, dD_, dbias_;
  Buffer<Scalar, 2> A_, dA_;
  Buffer<Scalar, 3> initial_, final_, dfinal_, dinitial_;
  ScanInputs<Scalar, Storage> in_;
  ScanOutputs<Scalar, Storage> y_;
  ScanOutputGradients<Scalar, Storage> dy_;
  ScanInputGradients<Scalar, Storage> dx_;
  ScanOptions options_, backward_options_;
  ScanSaved<Scalar> saved_;
  ScanProblem<Scalar> x_;
  ScanUpstream<Scalar> upstream_;
};

// Throws Failure if the call that the bytes choose is not as it should be.
inline void check_scan(std::span<const std::uint8_t> bytes, Reached* reached = nullptr,
                       Sabotage sabotage = Sabotage::none) {
  check_call<Scan>(ScanCall(Bytes(bytes)), scan_illegal_names, reached, sabotage);
}

}  // namespace fuzz
