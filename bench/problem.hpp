// Random tensors of one sequence, [1, T, heads, D], with gates as a trained model has them.
#pragma once

#include <cmath>
#include <cstdint>
#include <momentum_delta/momentum_delta.hpp>
#include <random>
#include <vector>

namespace bench {

namespace md = momentum_delta;
using md::Index;

inline constexpr Index heads = 6;

class Random {
 public:
  double uniform(double low, double high) { return low + (high - low) * 0x1p-64 * double(bits_()); }

  // Mean 0, variance 1, nearly normal: a sum of four uniform numbers.
  double normal() {
    const std::uint64_t bits = bits_();
    std::uint64_t sum = 0;
    for (int i = 0; i < 64; i += 16) sum += bits >> i & 0xffff;
    return (double(sum) * 0x1p-16 - 2.0) * 1.7320508;
  }

 private:
  std::mt19937_64 bits_{1};
};

template <class Scalar, class Storage = Scalar>
struct Problem {
  using Tokens = std::vector<Storage>;
  using Gates = std::vector<Scalar>;

  Index T, K, V;
  Random random{};
  Tokens q = normal_tokens(K), k = normal_tokens(K), v = normal_tokens(V), p = Tokens(k.size());
  Gates log_alpha = uniform_gates(-0.015, -0.005), log_mu = uniform_gates(-0.6, -0.4);
  Gates beta = uniform_gates(1, 1), eta = uniform_gates(1, 1);
  Tokens o = Tokens(v.size());

  Problem(Index tokens, Index key_size, Index value_size) : T(tokens), K(key_size), V(value_size) {
    for (Index i = 0; i < T * heads; ++i) {  // k of unit length, p = alpha k
      const Index begin = i * K, end = begin + K;
      Scalar squares = 0;
      for (Index j = begin; j < end; ++j) squares += Scalar(k[std::size_t(j)]) * Scalar(k[std::size_t(j)]);
      const Scalar alpha = std::exp(log_alpha[std::size_t(i)]);
      for (Index j = begin; j < end; ++j) {
        const Scalar k_j = Scalar(k[std::size_t(j)]) / std::sqrt(squares);
        k[std::size_t(j)] = Storage(k_j);
        p[std::size_t(j)] = Storage(alpha * k_j);
      }
    }
  }

  Tokens normal_tokens(Index D) {
    Tokens x(std::size_t(T * heads * D));
    for (Storage& element : x) element = Storage(Scalar(random.normal()));
    return x;
  }
  Gates uniform_gates(double low, double high) {
    Gates x(std::size_t(T * heads));
    for (Scalar& gate : x) gate = Scalar(random.uniform(low, high));
    return x;
  }

  md::TokenView<Storage> tokens(Tokens& x) const {
    return {x.data(), {1, T, heads, Index(x.size()) / (T * heads)}};
  }
  md::GateView<Scalar> gates(Gates& x) const { return {x.data(), {1, T, heads}}; }

  md::Inputs<Scalar, Storage> inputs() {
    return {.q = tokens(q),
            .k = tokens(k),
            .v = tokens(v),
            .p = tokens(p),
            .log_alpha = gates(log_alpha),
            .log_mu = gates(log_mu),
            .beta = gates(beta),
            .eta = gates(eta)};
  }
  md::Outputs<Scalar, Storage> outputs() { return {.o = tokens(o)}; }
};

// The gradient of a loss by a problem's o, and room for those by all its inputs.
template <class Scalar, class Storage>
struct Gradients {
  using Tokens = std::vector<Storage>;
  using Gates = std::vector<Scalar>;

  Problem<Scalar, Storage>& of;
  Tokens do_ = of.normal_tokens(of.V);
  Tokens dq = Tokens(of.q.size()), dk = dq, dv = Tokens(of.v.size()), dp = dq;
  Gates dlog_alpha = Gates(of.log_alpha.size()), dlog_mu = dlog_alpha, dbeta = dlog_alpha, deta = dlog_alpha;

  explicit Gradients(Problem<Scalar, Storage>& problem) : of(problem) {}

  md::OutputGradients<Scalar, Storage> upstream() { return {.do_ = of.tokens(do_)}; }
  md::InputGradients<Scalar, Storage> views() {
    return {.dq = of.tokens(dq),
            .dk = of.tokens(dk),
            .dv = of.tokens(dv),
            .dp = of.tokens(dp),
            .dlog_alpha = of.gates(dlog_alpha),
            .dlog_mu = of.gates(dlog_mu),
            .dbeta = of.gates(dbeta),
            .deta = of.gates(deta)};
  }
};

}  // namespace bench
