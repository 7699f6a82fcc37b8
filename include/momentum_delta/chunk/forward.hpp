// The momentum delta rule, a chunk of n tokens at a time. With the decay mask (decay_mask.hpp), kt = eta k,
// and S_0, M_0 the state before the chunk, unrolling the recurrence over the chunk gives
//
//   N = [p_t . kt_j G_{t-1,j}]_{j<t}                          strictly lower
//   (I + N) u = v - A_{t-1} (p S_0) + b_{t-1} (p M_0)         unit lower triangular, solved for u
//   o   = A_t (q S_0) - b_t (q M_0) + [q_t . kt_j G_tj]_{j<=t} u
//   S_n = A_n S_0 - b_n M_0 + (kt .* G_n)^T u
//   M_n = m_n M_0 - (kt .* D_n)^T u
//
// with q already scaled. Token t of the formulas is row t - 1 here. A later token never meets an earlier
// output, not even multiplied by 0: the loops end at the diagonal, so a NaN in the future cannot leak into
// the past.
#pragma once

#include <algorithm>

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/head.hpp"

namespace momentum_delta::detail {

// ChunkSize: the number of tokens in a full chunk if known at compile time, else Eigen::Dynamic.
template <class Scalar, int ChunkSize = Eigen::Dynamic>
class ChunkForward {
 public:
  ChunkForward(Index chunk_size, Index K, Index V)
      : chunk_size_(chunk_size),
        mask_(chunk_size),
        q_(chunk_size, K),
        p_(chunk_size, K),
        kt_(chunk_size, K),
        kG_(chunk_size, K),
        kD_(chunk_size, K),
        pk_(chunk_size, chunk_size),
        qk_(chunk_size, chunk_size),
        u_(chunk_size, V),
        o_(chunk_size, V),
        xM_(chunk_size, V) {}

  // S, M: in, the state before the first token; out, after the last. o: T x V, assigned.
  void operator()(const Head<Scalar>& x, MatrixRef<Scalar> S, MatrixRef<Scalar> M, RowsMap<Scalar> o) {
    for (Index t = 0; t < x.T(); t += chunk_size_) {
      const Index left = x.T() - t;
      if (ChunkSize != Eigen::Dynamic && left >= ChunkSize) {
        chunk(x, t, Eigen::fix<ChunkSize>, S, M, o);
      } else {
        chunk(x, t, std::min(left, chunk_size_), S, M, o);
      }
    }
  }

 private:
  // Tokens [t0, t0 + size). Size: Index, or a compile-time constant.
  template <class Size>
  void chunk(const Head<Scalar>& x, Index t0, const Size& size, MatrixRef<Scalar> S, MatrixRef<Scalar> M,
             RowsMap<Scalar> o_out) {
    const Index n = size;
    auto q = q_.topRows(size), p = p_.topRows(size), kt = kt_.topRows(size), kG = kG_.topRows(size),
         kD = kD_.topRows(size);
    auto pk = pk_.topLeftCorner(size, size), qk = qk_.topLeftCorner(size, size);
    auto u = u_.topRows(size), o = o_.topRows(size), xM = xM_.topRows(size);

    mask_.build(
        n, [&](Index i) { return x.log_alpha[t0 + i]; }, [&](Index i) { return x.log_mu[t0 + i]; },
        [&](Index i) { return x.beta[t0 + i]; });
    // Copies at fixed alignment: Eigen's small products sum in an order that depends on the address of their
    // operands.
    q = x.scale * x.q.middleRows(t0, size);                                     // n x K
    p = x.p.middleRows(t0, size);                                               // n x K
    for (Index i = 0; i < n; ++i) kt.row(i) = x.eta[t0 + i] * x.k.row(t0 + i);  // n x K

    // (I + N) u = v - A_{t-1} (p S_0) + b_{t-1} (p M_0)
    pk.noalias() = p * kt.transpose();  // n x n
    u.noalias() = p * S;                // n x V
    xM.noalias() = p * M;               // n x V
    for (Index i = 0; i < n; ++i) {
      pk.row(i).head(i).array() *= mask_.G(i).array();  // row i of N
      u.row(i) = x.v.row(t0 + i) - mask_.A(i) * u.row(i) + mask_.b(i) * xM.row(i);
      u.row(i).noalias() -= pk.row(i).head(i) * u.topRows(i);
    }

    // o = A_t (q S_0) - b_t (q M_0) + [q_t . kt_j G_tj]_{j<=t} u
    qk.noalias() = q * kt.transpose();  // n x n
    o.noalias() = q * S;                // n x V
    xM.noalias() = q * M;               // n x V
    for (Index i = 0; i < n; ++i) {
      qk.row(i).head(i + 1).array() *= mask_.G(i + 1).array();
      o.row(i) = mask_.A(i + 1) * o.row(i) - mask_.b(i + 1) * xM.row(i);
      o.row(i).noalias() += qk.row(i).head(i + 1) * u.topRows(i + 1);
    }
    o_out.middleRows(t0, size) = o;

    // S_n = A_n S_0 - b_n M_0 + (kt .* G_n)^T u and M_n = m_n M_0 - (kt .* D_n)^T u
    kG = kt.array().colwise() * mask_.G(n).transpose().array();  // n x K
    kD = kt.array().colwise() * mask_.D(n).transpose().array();  // n x K
    S = mask_.A(n) * S - mask_.b(n) * M;                         // K x V
    S.noalias() += kG.transpose() * u;                           // K x V
    M *= mask_.m(n);                                             // K x V
    M.noalias() -= kD.transpose() * u;                           // K x V
  }

  Index chunk_size_;
  DecayMask<Scalar> mask_;
  Matrix<Scalar> q_, p_, kt_, kG_, kD_;  // n x K
  Matrix<Scalar> pk_, qk_;               // n x n
  Matrix<Scalar> u_, o_, xM_;            // n x V
};

}  // namespace momentum_delta::detail
