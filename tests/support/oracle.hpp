// The definition, token by token in long double, in plain loops that share no code with include/.
#pragma once

#include <cmath>
#include <vector>

#include "../../examples/support/case_file.hpp"

namespace test {

using examples::Array;
using examples::Index;
using examples::Problem;
using examples::Results;

inline Results<long double> oracle(const Problem<double>& x) {
  using Real = long double;
  const Index T = x.v.shape[1], HV = x.v.shape[2], K = x.k.shape[3], V = x.v.shape[3];
  Results<Real> y{examples::zeros<Real>(x.v.shape), examples::zeros<Real>(x.state_shape()),
                  examples::zeros<Real>(x.state_shape())};
  const Real scale = x.scale ? Real(*x.scale) : 1 / std::sqrt(Real(K));
  for (Index n = 0; n < x.states(); ++n) {
    const Index b = x.cu_seqlens.empty() ? n : 0;
    const Index begin = x.cu_seqlens.empty() ? 0 : x.cu_seqlens[std::size_t(n)];
    const Index end = x.cu_seqlens.empty() ? T : x.cu_seqlens[std::size_t(n) + 1];
    for (Index h = 0; h < HV; ++h) {
      std::vector<Real> S(std::size_t(K * V)), M(std::size_t(K * V)), u(static_cast<std::size_t>(V));
      const auto at = [&](Index i, Index j) { return std::size_t(i * V + j); };
      for (std::size_t i = 0; i < S.size(); ++i) {
        const std::size_t from = std::size_t((n * HV + h) * K * V) + i;
        if (!x.initial_S.absent()) S[i] = x.initial_S.values[from];
        if (!x.initial_M.absent()) M[i] = x.initial_M.values[from];
      }
      for (Index t = begin; t < end; ++t) {
        const auto token = [&](const Array<double>& a, Index d) -> Real {
          const Index H = a.shape[2];
          return a.values[std::size_t(((b * T + t) * H + h / (HV / H)) * a.shape[3] + d)];
        };
        const auto gate = [&](const Array<double>& a, Real absent) -> Real {
          return a.absent() ? absent : Real(a.values[std::size_t((b * T + t) * HV + h)]);
        };
        const Real alpha = std::exp(gate(x.log_alpha, 0)), mu = std::exp(gate(x.log_mu, -INFINITY));
        const Real beta = gate(x.beta, 1), eta = gate(x.eta, 1);
        for (Index j = 0; j < V; ++j) {
          u[std::size_t(j)] = token(x.v, j);
          for (Index i = 0; i < K; ++i) u[std::size_t(j)] -= token(x.p.absent() ? x.k : x.p, i) * S[at(i, j)];
        }
        for (Index j = 0; j < V; ++j) {
          Real o = 0;
          for (Index i = 0; i < K; ++i) {
            M[at(i, j)] = mu * M[at(i, j)] - eta * token(x.k, i) * u[std::size_t(j)];
            S[at(i, j)] = alpha * S[at(i, j)] - beta * M[at(i, j)];
            o += token(x.q, i) * S[at(i, j)];
          }
          y.o.values[std::size_t(((b * T + t) * HV + h) * V + j)] = scale * o;
        }
      }
      for (std::size_t i = 0; i < S.size(); ++i) {
        y.final_S.values[std::size_t((n * HV + h) * K * V) + i] = S[i];
        y.final_M.values[std::size_t((n * HV + h) * K * V) + i] = M[i];
      }
    }
  }
  return y;
}

}  // namespace test
