// The selective scan token by token in long double, in plain loops that share no code with include/, with its
// gradients; and random problems.
#pragma once

#include "../../examples/support/scan_case.hpp"
#include "golden.hpp"
#include "problem.hpp"

namespace test {

using examples::ScanGradients;
using examples::ScanProblem;
using examples::ScanResults;
using examples::ScanUpstream;
using momentum_delta::ScanOptions;

// Everything about one channel of one sequence that the oracle needs.
struct ScanChannel {
  using Real = long double;
  const ScanProblem<double>& x;
  Index b, d;

  Index T() const { return x.u.shape[1]; }
  Index D() const { return x.u.shape[2]; }
  Index N() const { return x.A.shape[1]; }
  std::size_t at(Index t) const { return std::size_t((b * T() + t) * D() + d); }
  std::size_t group_at(Index t, Index n) const {
    const Index G = x.B.shape[2];
    return std::size_t(((b * T() + t) * G + d / (D() / G)) * N() + n);
  }
  std::size_t state_at(Index n) const { return std::size_t((b * D() + d) * N() + n); }
  Real A(Index n) const { return x.A.values[std::size_t(d * N() + n)]; }
  Real skip() const { return x.D.absent() ? 0 : x.D.values[std::size_t(d)]; }
  Real step(Index t) const {
    return Real(x.delta.values[at(t)]) + (x.delta_bias.absent() ? 0 : x.delta_bias.values[std::size_t(d)]);
  }
  Real dt(Index t) const {
    const Real s = step(t);
    return x.delta_softplus ? std::max<Real>(s, 0) + std::log1p(std::exp(-std::abs(s))) : s;
  }
  Real decay(Index t, Index n) const { return dt(t) == 0 ? 1 : std::exp(dt(t) * A(n)); }
  static Real sigmoid(Real v) { return 1 / (1 + std::exp(-v)); }
};

inline ScanResults<long double> oracle(const ScanProblem<double>& x) {
  ScanResults<long double> y{examples::zeros<long double>(x.u.shape),
                             examples::zeros<long double>(x.state_shape())};
  for (Index b = 0; b < x.u.shape[0]; ++b) {
    for (Index d = 0; d < x.u.shape[2]; ++d) {
      const ScanChannel c{x, b, d};
      std::vector<long double> h(std::size_t(c.N()));
      for (Index n = 0; n < c.N(); ++n)
        if (!x.initial_state.absent()) h[std::size_t(n)] = x.initial_state.values[c.state_at(n)];
      for (Index t = 0; t < c.T(); ++t) {
        const long double u = x.u.values[c.at(t)];
        long double out = c.skip() * u;
        for (Index n = 0; n < c.N(); ++n) {
          long double& h_n = h[std::size_t(n)];
          h_n = c.decay(t, n) * h_n + c.dt(t) * x.B.values[c.group_at(t, n)] * u;
          out += x.C.values[c.group_at(t, n)] * h_n;
        }
        if (!x.z.absent()) out *= x.z.values[c.at(t)] * c.sigmoid(x.z.values[c.at(t)]);
        y.out.values[c.at(t)] = out;
      }
      for (Index n = 0; n < c.N(); ++n) y.final_state.values[c.state_at(n)] = h[std::size_t(n)];
    }
  }
  return y;
}

// The gradients of sum(out dout) + sum(final_state dfinal_state), with every state kept.
inline ScanGradients<long double> oracle_backward(const ScanProblem<double>& x,
                                                  const ScanUpstream<double>& dy) {
  ScanGradients<long double> g;
  ScanGradients<long double>::for_each([&](const std::string& name, auto get, auto get_input) {
    const auto shape = name == "dinitial_state" ? x.state_shape() : get_input(x).shape;
    if (!shape.empty()) get(g) = examples::zeros<long double>(shape);
  });
  const auto add = [](Array<long double>& to, std::size_t i, long double value) {
    if (!to.absent()) to.values[i] += value;
  };
  for (Index b = 0; b < x.u.shape[0]; ++b) {
    for (Index d = 0; d < x.u.shape[2]; ++d) {
      const ScanChannel c{x, b, d};
      const std::size_t N = std::size_t(c.N()), channel = std::size_t(d);
      std::vector<std::vector<long double>> h(1, std::vector<long double>(N));
      for (Index n = 0; n < c.N(); ++n)
        if (!x.initial_state.absent()) h[0][std::size_t(n)] = x.initial_state.values[c.state_at(n)];
      for (Index t = 0; t < c.T(); ++t) {
        h.push_back(h.back());
        for (Index n = 0; n < c.N(); ++n) {
          long double& h_n = h.back()[std::size_t(n)];
          h_n = c.decay(t, n) * h_n + c.dt(t) * x.B.values[c.group_at(t, n)] * x.u.values[c.at(t)];
        }
      }
      std::vector<long double> gh(N);
      for (Index n = 0; n < c.N(); ++n)
        if (!dy.dfinal_state.absent()) gh[std::size_t(n)] = dy.dfinal_state.values[c.state_at(n)];
      for (Index t = c.T(); t-- > 0;) {
        const std::size_t i = c.at(t);
        const std::vector<long double>&before = h[std::size_t(t)], &after = h[std::size_t(t) + 1];
        const long double u = x.u.values[i], dt = c.dt(t);
        long double y = c.skip() * u, dout = dy.dout.absent() ? 0 : dy.dout.values[i];
        for (Index n = 0; n < c.N(); ++n) y += x.C.values[c.group_at(t, n)] * after[std::size_t(n)];
        long double gy = dout;
        if (!x.z.absent()) {
          const long double z = x.z.values[i], s = c.sigmoid(z);
          add(g.dz, i, dout * y * s * (1 + z * (1 - s)));
          gy *= z * s;
        }
        long double du = gy * c.skip(), ddt = 0;
        add(g.dD, channel, gy * u);
        for (Index n = 0; n < c.N(); ++n) {
          const std::size_t k = c.group_at(t, n), s = std::size_t(n);
          gh[s] += x.C.values[k] * gy;
          add(g.dC, k, gy * after[s]);
          add(g.dB, k, gh[s] * dt * u);
          du += gh[s] * dt * x.B.values[k];
          ddt += gh[s] * x.B.values[k] * u;
          gh[s] *= c.decay(t, n);
          if (std::isfinite(c.A(n))) {
            ddt += gh[s] * before[s] * c.A(n);
            add(g.dA, channel * N + s, gh[s] * before[s] * dt);
          }
        }
        add(g.du, i, du);
        if (x.delta_softplus) ddt *= c.sigmoid(c.step(t));
        add(g.ddelta, i, ddt);
        add(g.ddelta_bias, channel, ddt);
      }
      for (Index n = 0; n < c.N(); ++n) add(g.dinitial_state, c.state_at(n), gh[std::size_t(n)]);
    }
  }
  return g;
}

struct GoldenScan {
  std::string file;
  examples::ScanCase data;
};

inline std::vector<GoldenScan> golden_scans() {
  std::vector<GoldenScan> cases;
  for (const auto& [path, file] : golden_files(examples::scan_kind))
    cases.push_back({path, examples::read_scan_case(file)});
  return cases;
}

struct ScanShape {
  Index B = 1, T = 0, D = 1, G = 1, N = 16;
};

// Everything present; every value a float, so that all precisions see the same numbers. dt is about 0.1, A
// from -1 to -N.
inline ScanProblem<double> random_scan(std::uint64_t seed, const ScanShape& s) {
  Random random(seed);
  const auto normal = [&](std::vector<Index> shape, double scale = 1, double shift = 0) {
    Array<double> x = examples::zeros<double>(std::move(shape));
    for (double& value : x.values) value = scale * random.normal() + shift;
    return x;
  };
  ScanProblem<double> x;
  x.u = normal({s.B, s.T, s.D});
  x.delta = normal({s.B, s.T, s.D}, 0.7);
  x.A = examples::zeros<double>({s.D, s.N});
  for (double& A : x.A.values) A = -std::exp(random.uniform(0, std::log(double(s.N) + 1)));
  x.B = normal({s.B, s.T, s.G, s.N});
  x.C = normal({s.B, s.T, s.G, s.N});
  x.D = normal({s.D});
  x.z = normal({s.B, s.T, s.D});
  x.delta_bias = normal({s.D}, 0.7, -2);
  x.initial_state = normal({s.B, s.D, s.N});
  return x.as<float>().as<double>();
}

inline ScanUpstream<double> random_upstream(std::uint64_t seed, const ScanProblem<double>& x) {
  Random random(seed ^ 0x5eed);
  ScanUpstream<double> dy{x.u, examples::zeros<double>(x.state_shape())};
  for (auto* a : {&dy.dout, &dy.dfinal_state})
    for (double& value : a->values) value = float(random.normal());
  return dy;
}

inline ScanOptions scan_recurrent() {
  return {.algorithm = Algorithm::recurrent};
}
inline ScanOptions scan_chunk(Index size) {
  return {.algorithm = Algorithm::chunk, .chunk_size = size};
}

template <class Scalar>
bool equal_values(const ScanResults<Scalar>& a, const ScanResults<Scalar>& b) {
  return equal_values(a.out, b.out) && equal_values(a.final_state, b.final_state);
}
template <class Scalar>
bool equal_values(const ScanGradients<Scalar>& a, const ScanGradients<Scalar>& b) {
  bool equal = true;
  ScanGradients<Scalar>::for_each(
      [&](const char*, auto get, auto) { equal &= equal_values(get(a), get(b)); });
  return equal;
}

}  // namespace test
