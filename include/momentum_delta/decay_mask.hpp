// Every exponential of a decay in this library. Gates are natural logs.
//
// In a chunk of n tokens, t and j count from 1 and 0 stands for "before the chunk". For j <= t
//
//   d_tj = log_mu_{j+1} + .. + log_mu_t        <= 0 for gates <= 0, and d_tt = 0
//   D_tj = exp(d_tj)                           what is left at t of what entered M at j
//   G_tj = alpha_t G_{t-1,j} + beta_t D_tj     what of it is in S at t;  G_{j-1,j} = 0 for j >= 1, G_00 = 0
//   A_t  = exp(log_alpha_1 + .. + log_alpha_t) what is left at t of S before the chunk
//
// Column 0 is what happens to M before the chunk: D_t0 is left of it, and G_t0 of it has entered S.
// The sums run forward from j and nothing is subtracted from them, so a reset is -inf (never inf - inf), the
// diagonal is exactly 0, and no exponent is the difference of two large numbers. There is no logarithm,
// division or epsilon. (Unrolling M_t = mu_t M_{t-1} - kt_t^T u_t and S_t = alpha_t S_{t-1} - beta_t M_t
// gives the above.)
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "momentum_delta/types.hpp"

namespace momentum_delta {

namespace detail {

// log of the smallest normal number.
template <class Real>
inline constexpr Real lowest_exponent =
    (std::numeric_limits<Real>::min_exponent - 1) * std::numbers::ln2_v<Real>;

}  // namespace detail

// exp(x) of a log gate or a sum of log gates, with exactly 0 at -inf. A decay below the smallest normal
// number is exactly 0 as well: the same rule for scalars and arrays, and no subnormal slows the kernels down.
template <class Scalar>
Scalar decay(const Scalar& x) {
  using std::exp, std::real;
  return real(x) < detail::lowest_exponent<detail::Real<Scalar>> ? Scalar(0) : exp(x);
}

namespace detail {

// y = decay(x) element by element, floats through a double exp: Eigen's float exp has up to 2.5 units of
// error in the last place with AVX-512, always the same for the same gate, and constant gates add it up from
// chunk to chunk. Eigen's vectorised exp is not 0 at -inf (5.6e-309 in double), so that end is set here.
// Blocks of fixed size, the last one padded, make every element take the vectorised path: the result depends
// on x alone, not on where in a row or at what address it stands.
template <class Scalar>
void decay_row(const Scalar* x, Scalar* y, Index n) {
  if constexpr (std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>) {
    constexpr int block = 16;
    for (Index from = 0; from < n; from += block) {
      const int size = int(std::min<Index>(block, n - from));
      Eigen::Array<double, block, 1> e = Eigen::Array<double, block, 1>::Zero();
      for (int i = 0; i < size; ++i) e[i] = x[from + i];
      e = e.exp().eval();
      for (int i = 0; i < size; ++i)
        y[from + i] = x[from + i] < lowest_exponent<Scalar> ? Scalar(0) : Scalar(e[i]);
    }
  } else {
    for (Index i = 0; i < n; ++i) y[i] = decay(x[i]);
  }
}

}  // namespace detail

// The decays of one chunk. Rows and columns 0 .. n; only entries with j <= t are ever written or read.
template <class Scalar>
class DecayMask {
 public:
  // Room for chunks of up to `chunk_size` tokens; build() allocates nothing.
  explicit DecayMask(Index chunk_size)
      : alpha_(chunk_size + 1),
        beta_(chunk_size + 1),
        A_(chunk_size + 1),
        d_(chunk_size + 1),
        D_(chunk_size + 1, chunk_size + 1),
        G_(chunk_size + 1, chunk_size + 1) {}

  // log_alpha, log_mu, beta: the gates of the chunk's tokens, callable with 0 <= i < n.
  template <class LogAlpha, class LogMu, class Beta>
  void build(Index n, const LogAlpha& log_alpha, const LogMu& log_mu, const Beta& beta) {
    A_[0] = Scalar(1);
    D_(0, 0) = Scalar(1);
    G_(0, 0) = Scalar(0);
    d_[0] = Scalar(0);
    Scalar a = Scalar(0);
    for (Index t = 1; t <= n; ++t) {
      a += log_alpha(t - 1);
      A_[t] = decay(a);
      d_.head(t).array() += log_mu(t - 1);  // j < t
      d_[t] = Scalar(0);
      detail::decay_row(d_.data(), &D_(t, 0), t + 1);
      alpha_[t] = decay(log_alpha(t - 1));
      beta_[t] = beta(t - 1);
      G_.row(t).head(t) = alpha_[t] * G_.row(t - 1).head(t) + beta_[t] * D_.row(t).head(t);
      G_(t, t) = beta_[t];
    }
  }

  Scalar A(Index t) const { return A_[t]; }                  // what is left of S_0
  Scalar m(Index t) const { return D_(t, 0); }               // what is left of M_0
  Scalar b(Index t) const { return G_(t, 0); }               // how much of M_0 has entered S
  auto D(Index t) const { return D_.row(t).segment(1, t); }  // D_t1 .. D_tt
  auto G(Index t) const { return G_.row(t).segment(1, t); }  // G_t1 .. G_tt

  // Gradients of a loss by the gates of the last build(n, ..), from those by the mask:
  //   dA     n + 1            by A_t; entry 0 is not read (A_0 = 1)
  //   dG     n + 1 x n + 1    by G_tj, j <= t, and by b_t in column 0; row 0 is not read (b_0 = 0)
  //   dD     n + 1            by D_nj, and by m_n in entry 0; earlier rows of D reach nothing but G
  // put(i, dlog_alpha, dlog_mu, dbeta) is called for each token i of the chunk, last one first.
  // The scans above in reverse, t = n .. 1. The rows of dG and the vector dD become running adjoints, gG and
  // gD.
  template <class Put>
  void backward(Index n, const detail::RowVector<Scalar>& dA, detail::Matrix<Scalar>& dG,
                detail::RowVector<Scalar>& dD, const Put& put) const {
    Scalar gA = Scalar(0);
    auto& gD = dD;
    for (Index t = n; t >= 1; --t) {
      auto gG = dG.row(t);
      const Scalar mu_t = D_(t, t - 1);
      gA += dA[t];
      const Scalar dbeta = (gG.head(t + 1).array() * D_.row(t).head(t + 1).array()).sum();
      gD.head(t + 1) += beta_[t] * gG.head(t + 1);
      const Scalar dalpha = (gG.head(t).array() * G_.row(t - 1).head(t).array()).sum() + gA * A_[t - 1];
      const Scalar dmu = (gD.head(t).array() * D_.row(t - 1).head(t).array()).sum();
      put(t - 1, alpha_[t] * dalpha, mu_t * dmu, dbeta);
      if (t > 1) dG.row(t - 1).head(t) += alpha_[t] * gG.head(t);
      gA *= alpha_[t];
      gD.head(t) *= mu_t;
    }
  }

 private:
  detail::RowVector<Scalar> alpha_, beta_, A_, d_;  // n + 1
  detail::Matrix<Scalar> D_, G_;                    // n + 1 x n + 1
};

}  // namespace momentum_delta
