// THE CONTRAST, NOT FOR USE: the chunk form as published, with the mask in the log domain. Kept to show, and
// to test, that it fails where the library does not. With A, L the cumulative log_alpha and log_mu of a chunk
// and c_t = sum_{i<=t} exp(L_i - A_i + log(beta_i + 1e-6)) formed by a log-cumulative-sum-exp,
//
//   G_tj = exp(A_t - L_j + log c_t) (1 - exp(log c_{j-1} - log c_t))
//
// The first factor grows like mu^-C and the second cancels it: float32 is exhausted once the sum of
// log(alpha / mu) over the chunk is 16. (flash-linear-attention, fla/ops/momentum_delta_rule/naive.py; here a
// partial last chunk is not padded.)
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <limits>

#include "case_file.hpp"

namespace examples {

template <class Scalar>
Results<Scalar> log_domain_form(const Problem<Scalar>& x, Index chunk_size) {
  using Matrix = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Vector = Eigen::Matrix<Scalar, Eigen::Dynamic, 1>;
  const Index T = x.v.shape[1], HV = x.v.shape[2], K = x.k.shape[3], V = x.v.shape[3];
  const Scalar scale = x.scale ? *x.scale : Scalar(1 / std::sqrt(Scalar(K)));
  const Scalar infinity = std::numeric_limits<Scalar>::infinity();
  Results<Scalar> y{zeros<Scalar>(x.v.shape), zeros<Scalar>(x.state_shape()), zeros<Scalar>(x.state_shape())};

  for (Index n = 0; n < x.states(); ++n) {
    const bool packed = !x.cu_seqlens.empty();
    const Index b = packed ? 0 : n;
    const Index begin = packed ? x.cu_seqlens[std::size_t(n)] : 0;
    const Index end = packed ? x.cu_seqlens[std::size_t(n) + 1] : T;
    for (Index h = 0; h < HV; ++h) {
      const auto row = [&](const Array<Scalar>& a, Index t) {
        const Index H = a.shape[2], D = a.shape[3];
        return Eigen::Map<const Eigen::Matrix<Scalar, 1, Eigen::Dynamic>>(
            a.values.data() + ((b * T + t) * H + h / (HV / H)) * D, D);
      };
      const auto gate = [&](const Array<Scalar>& a, Index t, Scalar absent) {
        return a.absent() ? absent : a.values[std::size_t((b * T + t) * HV + h)];
      };
      const auto state = [&](auto& a) {
        return Eigen::Map<
            std::conditional_t<std::is_const_v<std::remove_reference_t<decltype(a)>>, const Matrix, Matrix>>(
            a.values.data() + (n * HV + h) * K * V, K, V);
      };
      Matrix S = Matrix::Zero(K, V), M = Matrix::Zero(K, V);
      if (!x.initial_S.absent()) S = state(x.initial_S);
      if (!x.initial_M.absent()) M = state(x.initial_M);

      for (Index t0 = begin; t0 < end; t0 += chunk_size) {
        const Index C = std::min(chunk_size, end - t0);
        Vector A(C), L(C), log_c(C);
        Matrix q(C, K), kt(C, K), p(C, K), u(C, V), G = Matrix::Zero(C, C);
        Scalar a = 0, l = 0, lc = -infinity;
        for (Index i = 0; i < C; ++i) {
          a += gate(x.log_alpha, t0 + i, 0);
          l += gate(x.log_mu, t0 + i, -infinity);
          const Scalar term = std::log(gate(x.beta, t0 + i, 1) + Scalar(1e-6)) + l - a;
          const Scalar larger = std::max(lc, term), smaller = std::min(lc, term);
          lc = larger + std::log1p(std::exp(smaller - larger));
          A[i] = a, L[i] = l, log_c[i] = lc;
          q.row(i) = scale * row(x.q, t0 + i);
          kt.row(i) = gate(x.eta, t0 + i, 1) * row(x.k, t0 + i);
          p.row(i) = row(x.p.absent() ? x.k : x.p, t0 + i);
        }
        for (Index t = 0; t < C; ++t) {
          for (Index j = 0; j <= t; ++j) {
            const Scalar before = j == 0 ? -infinity : log_c[j - 1];
            G(t, j) = std::exp(A[t] - L[j] + log_c[t]) * (1 - std::exp(before - log_c[t]));
          }
        }
        const auto b_of = [&](Index t) { return t < 0 ? Scalar(0) : std::exp(A[t] + log_c[t]); };
        const auto A_of = [&](Index t) { return t < 0 ? Scalar(1) : std::exp(A[t]); };
        for (Index t = 0; t < C; ++t) {
          u.row(t) = row(x.v, t0 + t) - A_of(t - 1) * (p.row(t) * S) + b_of(t - 1) * (p.row(t) * M);
          for (Index j = 0; j < t; ++j) u.row(t) -= p.row(t).dot(kt.row(j)) * G(t - 1, j) * u.row(j);
        }
        for (Index t = 0; t < C; ++t) {
          Eigen::Map<Eigen::Matrix<Scalar, 1, Eigen::Dynamic>> o(
              y.o.values.data() + ((b * T + t0 + t) * HV + h) * V, V);
          o = A_of(t) * (q.row(t) * S) - b_of(t) * (q.row(t) * M);
          for (Index j = 0; j <= t; ++j) o += q.row(t).dot(kt.row(j)) * G(t, j) * u.row(j);
        }
        S = (A_of(C - 1) * S - b_of(C - 1) * M).eval();
        M *= std::exp(L[C - 1]);
        for (Index j = 0; j < C; ++j) {
          S += G(C - 1, j) * kt.row(j).transpose() * u.row(j);
          M -= std::exp(L[C - 1] - L[j]) * kt.row(j).transpose() * u.row(j);
        }
      }
      state(y.final_S) = S;
      state(y.final_M) = M;
    }
  }
  return y;
}

}  // namespace examples
