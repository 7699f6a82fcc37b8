// The definition, token by token in long double, in plain loops that share no code with include/.
#pragma once

#include <cmath>
#include <vector>

#include "../../examples/support/case_file.hpp"

namespace test {

using examples::Array;
using examples::Gradients;
using examples::Index;
using examples::Problem;
using examples::Results;
using examples::Upstream;

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

// The gradients of sum(o do) + sum(final_S dfinal_S) + sum(final_M dfinal_M), by reverse differentiation of
// the loop above with every state kept. `sizes`, if asked for, receives for every gate gradient the size of
// the terms it is a sum of: <gS, S> is at most |gS| |S|, with both taken before what cancels inside them has
// done so.
inline Gradients<long double> oracle_backward(const Problem<double>& x, const Upstream<double>& dy,
                                              Gradients<long double>* sizes = nullptr) {
  using Real = long double;
  const Index T = x.v.shape[1], HV = x.v.shape[2], K = x.k.shape[3], V = x.v.shape[3];
  const Real scale = x.scale ? Real(*x.scale) : 1 / std::sqrt(Real(K));
  const auto like = [](const Array<double>& a) {
    return a.absent() ? Array<Real>{} : examples::zeros<Real>(a.shape);
  };
  Gradients<Real> g{like(x.q),
                    like(x.k),
                    like(x.v),
                    like(x.p),
                    like(x.log_alpha),
                    like(x.log_mu),
                    like(x.beta),
                    like(x.eta),
                    examples::zeros<Real>(x.state_shape()),
                    examples::zeros<Real>(x.state_shape())};
  if (sizes != nullptr) *sizes = g;
  using State = std::vector<Real>;
  const auto norm = [](const auto& begin, const auto& end) {
    Real sum = 0;
    for (auto i = begin; i != end; ++i) sum += Real(*i) * Real(*i);
    return std::sqrt(sum);
  };
  for (Index n = 0; n < x.states(); ++n) {
    const Index b = x.cu_seqlens.empty() ? n : 0;
    const Index begin = x.cu_seqlens.empty() ? 0 : x.cu_seqlens[std::size_t(n)];
    const Index end = x.cu_seqlens.empty() ? T : x.cu_seqlens[std::size_t(n) + 1];
    for (Index h = 0; h < HV; ++h) {
      const auto at = [&](Index i, Index j) { return std::size_t(i * V + j); };
      const auto token = [&](const auto& a, Index t, Index d) {
        const Index H = a.shape[2];
        return std::size_t(((b * T + t) * H + h / (HV / H)) * a.shape[3] + d);
      };
      const auto gate = [&](const Array<double>& a, Index t, Real absent) -> Real {
        return a.absent() ? absent : Real(a.values[std::size_t((b * T + t) * HV + h)]);
      };
      const auto add = [&](Array<Real>& a, std::size_t i, Real value) {
        if (!a.absent()) a.values[i] += value;
      };
      const auto load = [&](const Array<double>& a) {
        State s(std::size_t(K * V));
        const std::size_t from = std::size_t((n * HV + h) * K * V);
        if (!a.absent()) std::copy_n(a.values.begin() + Index(from), s.size(), s.begin());
        return s;
      };
      const Array<double>& p = x.p.absent() ? x.k : x.p;
      Array<Real>& dp = x.p.absent() ? g.dk : g.dp;

      const auto length = [&](const Array<double>& a, Index t) {
        const auto from = a.values.begin() + Index(token(a, t, 0));
        return norm(from, from + a.shape[3]);
      };
      std::vector<State> S{load(x.initial_S)}, M{load(x.initial_M)}, u;
      std::vector<Real> size_S{norm(S[0].begin(), S[0].end())}, size_M{norm(M[0].begin(), M[0].end())};
      for (Index t = begin; t < end; ++t) {
        const Real alpha = std::exp(gate(x.log_alpha, t, 0)), mu = std::exp(gate(x.log_mu, t, -INFINITY));
        State s = S.back(), m = M.back(), u_t(static_cast<std::size_t>(V));
        for (Index j = 0; j < V; ++j) {
          Real& e = u_t[std::size_t(j)] = x.v.values[token(x.v, t, j)];
          for (Index i = 0; i < K; ++i) e -= p.values[token(p, t, i)] * S.back()[at(i, j)];
          for (Index i = 0; i < K; ++i) {
            m[at(i, j)] = mu * m[at(i, j)] - gate(x.eta, t, 1) * x.k.values[token(x.k, t, i)] * e;
            s[at(i, j)] = alpha * s[at(i, j)] - gate(x.beta, t, 1) * m[at(i, j)];
          }
        }
        S.push_back(s), M.push_back(m), u.push_back(u_t);
        size_M.push_back(mu * size_M.back() +
                         std::abs(gate(x.eta, t, 1)) * length(x.k, t) * norm(u_t.begin(), u_t.end()));
        size_S.push_back(alpha * size_S.back() + std::abs(gate(x.beta, t, 1)) * size_M.back());
      }

      State gS = load(dy.dfinal_S), gM = load(dy.dfinal_M);
      Real size_gS = norm(gS.begin(), gS.end()), size_gM = norm(gM.begin(), gM.end());
      for (Index t = end; t-- > begin;) {
        const State &S0 = S[std::size_t(t - begin)], &S1 = S[std::size_t(t - begin) + 1];
        const State &M0 = M[std::size_t(t - begin)], &M1 = M[std::size_t(t - begin) + 1];
        const std::size_t gate_at = std::size_t((b * T + t) * HV + h);
        const Real alpha = std::exp(gate(x.log_alpha, t, 0)), mu = std::exp(gate(x.log_mu, t, -INFINITY));
        const Real beta = gate(x.beta, t, 1), eta = gate(x.eta, t, 1);
        Real dalpha = 0, dmu = 0, dbeta = 0, deta = 0;
        State du(static_cast<std::size_t>(V));
        for (Index i = 0; i < K; ++i) {
          const Real q_i = x.q.values[token(x.q, t, i)], k_i = x.k.values[token(x.k, t, i)];
          Real dq_i = 0, dkt_i = 0;
          for (Index j = 0; j < V; ++j) {
            const Real do_j = dy.do_.absent() ? 0 : Real(dy.do_.values[token(dy.do_, t, j)]);
            dq_i += scale * do_j * S1[at(i, j)];
            Real &gS_ij = gS[at(i, j)], &gM_ij = gM[at(i, j)];
            gS_ij += scale * q_i * do_j;
            dbeta -= gS_ij * M1[at(i, j)];
            dalpha += gS_ij * S0[at(i, j)];
            gM_ij -= beta * gS_ij;
            gS_ij *= alpha;
            dmu += gM_ij * M0[at(i, j)];
            dkt_i -= gM_ij * u[std::size_t(t - begin)][std::size_t(j)];
            du[std::size_t(j)] -= eta * k_i * gM_ij;
            gM_ij *= mu;
          }
          add(g.dq, token(x.q, t, i), dq_i);
          add(g.dk, token(x.k, t, i), eta * dkt_i);
          deta += k_i * dkt_i;
        }
        for (Index i = 0; i < K; ++i) {
          Real dp_i = 0;
          for (Index j = 0; j < V; ++j) {
            dp_i -= du[std::size_t(j)] * S0[at(i, j)];
            gS[at(i, j)] -= p.values[token(p, t, i)] * du[std::size_t(j)];
          }
          add(dp, token(p, t, i), dp_i);
        }
        for (Index j = 0; j < V; ++j) add(g.dv, token(x.v, t, j), du[std::size_t(j)]);
        add(g.dlog_alpha, gate_at, alpha * dalpha);
        add(g.dlog_mu, gate_at, mu * dmu);
        add(g.dbeta, gate_at, dbeta);
        add(g.deta, gate_at, deta);

        const std::size_t before = std::size_t(t - begin);
        const State& u_t = u[before];
        if (!dy.do_.absent()) size_gS += scale * length(x.q, t) * length(dy.do_, t);
        size_gM += std::abs(beta) * size_gS;
        if (sizes != nullptr) {
          add(sizes->dlog_alpha, gate_at, alpha * size_gS * size_S[before]);
          add(sizes->dlog_mu, gate_at, mu * size_gM * size_M[before]);
          add(sizes->dbeta, gate_at, size_gS * size_M[before + 1]);
          add(sizes->deta, gate_at, size_gM * length(x.k, t) * norm(u_t.begin(), u_t.end()));
        }
        size_gS = alpha * size_gS + length(p, t) * norm(du.begin(), du.end());
        size_gM *= mu;
      }
      for (std::size_t i = 0; i < gS.size(); ++i) {
        g.dinitial_S.values[std::size_t((n * HV + h) * K * V) + i] = gS[i];
        g.dinitial_M.values[std::size_t((n * HV + h) * K * V) + i] = gM[i];
      }
    }
  }
  return g;
}

}  // namespace test
