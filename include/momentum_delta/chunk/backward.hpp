// Gradients of the chunk form (forward.hpp), chunk by chunk in reverse. From do, dS_n, dM_n:
//
//   kS = kt dS_n, kM = kt dM_n
//   du  = Q^T do + G_n .* kS - D_n .* kM
//   dR  = (I + N)^{-T} du                                     by the right-hand side of the solve; dv = dR
//   X   = -(dR u^T)_{j<t} .* G_{t-1,j}                        by p_t . kt_j
//   Y   = (do u^T)_{j<=t} .* G_tj                             by q_t . kt_j
//   dq  = A_t (do S_0^T) - b_t (do M_0^T) + Y kt
//   dp  = -A_{t-1} (dR S_0^T) + b_{t-1} (dR M_0^T) + X kt
//   dkt = Y^T q + X^T p + G_n .* (u dS_n^T) - D_n .* (u dM_n^T)
//   dS_0 = A_n dS_n + q^T (A_t do) - p^T (A_{t-1} dR)
//   dM_0 = -b_n dS_n + m_n dM_n - q^T (b_t do) + p^T (b_{t-1} dR)
//
// and by the mask, whose own gradients are in decay_mask.hpp,
//
//   dG_tj = (do u^T)_tj (q kt^T)_tj - (dR u^T)_{t+1,j} (p kt^T)_{t+1,j};  row n also kS_j . u_j
//   dA_t  = do_t . (q_t S_0) - dR_{t+1} . (p_{t+1} S_0);                  A_n also <dS_n, S_0>
//   db_t  = -do_t . (q_t M_0) + dR_{t+1} . (p_{t+1} M_0);                 b_n also -<dS_n, M_0>
//   dD_nj = -kM_j . u_j;  dm_n = <dM_n, M_0>
//
// (do_t . (q_t S_0) is q_t . (do_t S_0^T), which dq has computed.)
// Last, dq *= scale, dk = eta dkt, deta = k . dkt.
#pragma once

#include <algorithm>
#include <vector>

#include "momentum_delta/chunk/forward.hpp"
#include "momentum_delta/detail/head_gradients.hpp"
#include "momentum_delta/saved.hpp"

namespace momentum_delta::detail {

template <class Scalar>
class ChunkBackward {
 public:
  // For chunks of chunk_size with `interval` of them between two checkpoints.
  ChunkBackward(Index chunk_size, Index interval, const Sizes& s)
      : c_(chunk_size, s.K, s.V),
        states_(std::size_t(2 * interval), Matrix<Scalar>(s.K, s.V)),
        do_(chunk_size, s.V),
        dR_(chunk_size, s.V),
        kS_(chunk_size, s.V),
        kM_(chunk_size, s.V),
        row_V_(chunk_size, s.V),
        doS_(chunk_size, s.K),
        doM_(chunk_size, s.K),
        dRS_(chunk_size, s.K),
        dRM_(chunk_size, s.K),
        dq_(chunk_size, s.K),
        dp_(chunk_size, s.K),
        dkt_(chunk_size, s.K),
        udS_(chunk_size, s.K),
        udM_(chunk_size, s.K),
        dou_(chunk_size, chunk_size),
        dRu_(chunk_size, chunk_size),
        X_(chunk_size, chunk_size),
        Y_(chunk_size, chunk_size),
        dA_(chunk_size + 1),
        dD_(chunk_size + 1),
        dG_(chunk_size + 1, chunk_size + 1) {}

  // dS, dM: in, gradients by the state after the last token; out, by the state before the first.
  void operator()(const Head<Scalar>& x, const Recorded<Scalar>& saved, const HeadGradients<Scalar>& g,
                  MatrixRef<Scalar> dS, MatrixRef<Scalar> dM) {
    const Index C = saved.chunk_size();
    for (Index c = saved.checkpoints(); c-- > 0;) {
      const Index begin = saved.begin(c), end = saved.end(c);
      const Index last = (end - begin - 1) / C;  // chunk of the interval
      saved.state(c, S_before(0), M_before(0));
      for (Index i = 0; i < last; ++i) {
        rebuild(x, saved, begin + i * C, C, i);
        S_before(i + 1) = S_before(i);
        M_before(i + 1) = M_before(i);
        c_.carry(C, S_before(i + 1), M_before(i + 1));
      }
      for (Index i = last; i >= 0; --i) {
        const Index t0 = begin + i * C, n = std::min(C, end - t0);
        rebuild(x, saved, t0, n, i);
        c_.form_Q(n);
        chunk(x, t0, n, S_before(i), M_before(i), g, dS, dM);
      }
    }
  }

 private:
  Matrix<Scalar>& S_before(Index chunk) { return states_[std::size_t(2 * chunk)]; }
  Matrix<Scalar>& M_before(Index chunk) { return states_[std::size_t(2 * chunk + 1)]; }

  // What the forward pass had of the tokens [t0, t0 + n), chunk i of its interval, up to u.
  void rebuild(const Head<Scalar>& x, const Recorded<Scalar>& saved, Index t0, Index n, Index i) {
    c_.load(x, t0, n);
    c_.form_N(n);
    if (saved.has_u())
      c_.u.topRows(n) = saved.u(t0, n);
    else
      c_.solve_u(x, t0, n, S_before(i), M_before(i));
  }

  // Tokens [t0, t0 + n), rebuilt in c_; S, M: the state before them.
  void chunk(const Head<Scalar>& x, Index t0, Index n, const Matrix<Scalar>& S, const Matrix<Scalar>& M,
             const HeadGradients<Scalar>& g, MatrixRef<Scalar> dS, MatrixRef<Scalar> dM) {
    const DecayMask<Scalar>& mask = c_.mask;
    const auto q = c_.q.topRows(n), p = c_.p.topRows(n), kt = c_.kt.topRows(n), u = c_.u.topRows(n);
    const auto pk = c_.pk.topLeftCorner(n, n), qk = c_.qk.topLeftCorner(n, n);
    const auto N = c_.N.topLeftCorner(n, n), Q = c_.Q.topLeftCorner(n, n);
    auto do_n = do_.topRows(n), dR = dR_.topRows(n), kS = kS_.topRows(n), kM = kM_.topRows(n);
    auto doS = doS_.topRows(n), doM = doM_.topRows(n), dRS = dRS_.topRows(n), dRM = dRM_.topRows(n);
    auto dq = dq_.topRows(n), dp = dp_.topRows(n), dkt = dkt_.topRows(n);
    auto udS = udS_.topRows(n), udM = udM_.topRows(n), row_V = row_V_.topRows(n);
    auto dou = dou_.topLeftCorner(n, n), dRu = dRu_.topLeftCorner(n, n);
    auto X = X_.topLeftCorner(n, n), Y = Y_.topLeftCorner(n, n);

    // du = Q^T do + G_n .* kS - D_n .* kM, and dR = (I + N)^{-T} du in its place
    g.read_do(t0, do_n);     // n x V
    kS.noalias() = kt * dS;  // n x V
    kM.noalias() = kt * dM;  // n x V
    for (Index j = 0; j < n; ++j) dR.row(j) = mask.G(n)[j] * kS.row(j) - mask.D(n)[j] * kM.row(j);
    add_lower_transposed_product(Q, do_n, dR);  // n x V
    solve_unit_lower_transposed(N, dR);         // n x V
    g.dv.put(t0, dR);

    // Gradients by the products: of p_t . kt_j, j < t, and of q_t . kt_j, j <= t
    dou.noalias() = do_n * u.transpose();  // n x n
    dRu.noalias() = dR * u.transpose();    // n x n
    for (Index i = 0; i < n; ++i) {
      X.row(i).head(i) = -dRu.row(i).head(i).cwiseProduct(mask.G(i));
      Y.row(i).head(i + 1) = dou.row(i).head(i + 1).cwiseProduct(mask.G(i + 1));
    }
    const auto X_strict = X.bottomLeftCorner(n - 1, n - 1);  // a lower triangle: rows 1 .., columns .. n - 2

    // dq = A_t (do S_0^T) - b_t (do M_0^T) + Y kt
    doS.noalias() = do_n * S.transpose();  // n x K
    doM.noalias() = do_n * M.transpose();  // n x K
    for (Index i = 0; i < n; ++i) dq.row(i) = mask.A(i + 1) * doS.row(i) - mask.b(i + 1) * doM.row(i);
    add_lower_product(Y, kt, dq);  // n x K
    dq *= x.scale;
    g.dq.put(t0, dq);

    // dp = -A_{t-1} (dR S_0^T) + b_{t-1} (dR M_0^T) + X kt
    dRS.noalias() = dR * S.transpose();  // n x K
    dRM.noalias() = dR * M.transpose();  // n x K
    for (Index i = 0; i < n; ++i) dp.row(i) = mask.b(i) * dRM.row(i) - mask.A(i) * dRS.row(i);
    add_lower_product(X_strict, kt, dp.bottomRows(n - 1));  // n x K

    // dkt = Y^T q + X^T p + G_n .* (u dS_n^T) - D_n .* (u dM_n^T)
    udS.noalias() = u * dS.transpose();  // n x K
    udM.noalias() = u * dM.transpose();  // n x K
    for (Index j = 0; j < n; ++j) dkt.row(j) = mask.G(n)[j] * udS.row(j) - mask.D(n)[j] * udM.row(j);
    add_lower_transposed_product(Y, q, dkt);  // n x K
    add_lower_transposed_product(X_strict, p.bottomRows(n - 1), dkt.topRows(n - 1));
    for (Index j = 0; j < n; ++j) {
      g.deta.put(t0 + j, dkt.row(j).cwiseProduct(x.k.row(t0 + j)).sum());
      dkt.row(j) *= x.eta[t0 + j];
    }
    g.dk.put(t0, dkt);
    g.dp.put(t0, dp);  // after dk, to which it adds if p is k

    // By the mask: row t of dG and entry t of dA; column 0 is db, entry 0 of dD is dm_n
    for (Index t = 1; t <= n; ++t) {
      const Index i = t - 1;
      auto dG = dG_.row(t).segment(1, t);
      dG = dou.row(i).head(t).cwiseProduct(qk.row(i).head(t));
      dA_[t] = q.row(i).cwiseProduct(doS.row(i)).sum();
      dG_(t, 0) = -q.row(i).cwiseProduct(doM.row(i)).sum();
      if (t == n) break;
      dG -= dRu.row(t).head(t).cwiseProduct(pk.row(t).head(t));
      dA_[t] -= p.row(t).cwiseProduct(dRS.row(t)).sum();
      dG_(t, 0) += p.row(t).cwiseProduct(dRM.row(t)).sum();
    }
    for (Index j = 0; j < n; ++j) {
      dG_(n, j + 1) += kS.row(j).cwiseProduct(u.row(j)).sum();
      dD_[j + 1] = -kM.row(j).cwiseProduct(u.row(j)).sum();
    }
    dA_[n] += dS.cwiseProduct(S).sum();
    dG_(n, 0) -= dS.cwiseProduct(M).sum();
    dD_[0] = dM.cwiseProduct(M).sum();
    mask.backward(n, dA_, dG_, dD_, [&](Index i, Scalar dlog_alpha, Scalar dlog_mu, Scalar dbeta) {
      g.dlog_alpha.put(t0 + i, dlog_alpha);
      g.dlog_mu.put(t0 + i, dlog_mu);
      g.dbeta.put(t0 + i, dbeta);
    });

    // dM_0 = -b_n dS_n + m_n dM_n - q^T (b_t do) + p^T (b_{t-1} dR)
    dM = mask.m(n) * dM - mask.b(n) * dS;                                      // K x V
    for (Index i = 0; i < n; ++i) row_V.row(i) = mask.b(i + 1) * do_n.row(i);  // n x V
    dM.noalias() -= q.transpose() * row_V;
    for (Index i = 0; i < n; ++i) row_V.row(i) = mask.b(i) * dR.row(i);  // n x V
    dM.noalias() += p.transpose() * row_V;

    // dS_0 = A_n dS_n + q^T (A_t do) - p^T (A_{t-1} dR)
    dS *= mask.A(n);                                                           // K x V
    for (Index i = 0; i < n; ++i) row_V.row(i) = mask.A(i + 1) * do_n.row(i);  // n x V
    dS.noalias() += q.transpose() * row_V;
    for (Index i = 0; i < n; ++i) row_V.row(i) = mask.A(i) * dR.row(i);  // n x V
    dS.noalias() -= p.transpose() * row_V;
  }

  Chunk<Scalar> c_;
  std::vector<Matrix<Scalar>> states_;                                // S, M before each chunk of an interval
  Matrix<Scalar> do_, dR_, kS_, kM_, row_V_;                          // n x V
  Matrix<Scalar> doS_, doM_, dRS_, dRM_, dq_, dp_, dkt_, udS_, udM_;  // n x K
  Matrix<Scalar> dou_, dRu_, X_, Y_;                                  // n x n
  RowVector<Scalar> dA_, dD_;                                         // n + 1
  Matrix<Scalar> dG_;                                                 // n + 1 x n + 1
};

}  // namespace momentum_delta::detail
