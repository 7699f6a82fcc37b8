// The momentum delta rule, a chunk of n tokens at a time. With the decay mask (decay_mask.hpp), kt = eta k,
// and S_0, M_0 the state before the chunk, unrolling the recurrence over the chunk gives
//
//   N = [p_t . kt_j G_{t-1,j}]_{j<t}                          strictly lower
//   (I + N) u = v - A_{t-1} (p S_0) + b_{t-1} (p M_0)         unit lower triangular, solved for u
//   Q = [q_t . kt_j G_tj]_{j<=t}                              lower
//   o   = A_t (q S_0) - b_t (q M_0) + Q u
//   S_n = A_n S_0 - b_n M_0 + (kt .* G_n)^T u
//   M_n = m_n M_0 - (kt .* D_n)^T u
//
// with q already scaled. Token t of the formulas is row t - 1 here. A later token never meets an earlier
// output, not even multiplied by 0: the loops end at the diagonal, so a NaN in the future cannot leak into
// the past.
//
// Rounding. The mask is exact to rounding for gates <= 0, but u is a difference of what v, S_0 and the
// earlier u of the chunk contribute: its error is relative to the largest of them, until the chunk ends.
// Where a key overwrites a value that was 1e4 times larger, what follows in that chunk has up to 1e4 times
// the rounding error of the recurrence, which corrects itself at every token. Smaller chunks shorten this;
// chunks of one token are the recurrence. A product of decays inside a chunk is 0 below the smallest normal
// number; positive log gates must not sum to more than the range of exp (88 in float) inside a chunk.
#pragma once

#include <algorithm>

#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/detail/triangular.hpp"

namespace momentum_delta::detail {

// One chunk's intermediates and the passes over them. Every `size` is the chunk's number of tokens, up to the
// chunk_size of the constructor: an Index, or a compile-time constant.
template <class Scalar>
struct Chunk {
  DecayMask<Scalar> mask;
  Matrix<Scalar> q, p, kt;      // n x K; q scaled
  Matrix<Scalar> pk, qk, N, Q;  // n x n
  Matrix<Scalar> u;             // n x V
  Matrix<Scalar> pM, o, qM;     // n x V
  Matrix<Scalar> kG, kD;        // n x K

  Chunk(Index chunk_size, Index K, Index V)
      : mask(chunk_size),
        q(chunk_size, K),
        p(chunk_size, K),
        kt(chunk_size, K),
        pk(chunk_size, chunk_size),
        qk(chunk_size, chunk_size),
        N(chunk_size, chunk_size),
        Q(chunk_size, chunk_size),
        u(chunk_size, V),
        pM(chunk_size, V),
        o(chunk_size, V),
        qM(chunk_size, V),
        kG(chunk_size, K),
        kD(chunk_size, K) {}

  // Mask, q, p, kt of the tokens [t0, t0 + size). They are copies at fixed alignment: Eigen's small products
  // sum in an order that depends on the address of their operands.
  template <class Size>
  void load(const Head<Scalar>& x, Index t0, Size size) {
    mask.build(
        size, [&](Index i) { return x.log_alpha[t0 + i]; }, [&](Index i) { return x.log_mu[t0 + i]; },
        [&](Index i) { return x.beta[t0 + i]; });
    q.topRows(size) = x.scale * x.q.middleRows(t0, size);
    p.topRows(size) = x.p.middleRows(t0, size);
    for (Index i = 0; i < size; ++i) kt.row(i) = x.eta[t0 + i] * x.k.row(t0 + i);
  }

  // N, from the mask.
  template <class Size>
  void form_N(Size size) {
    pk.topLeftCorner(size, size).noalias() = p.topRows(size) * kt.topRows(size).transpose();
    for (Index i = 0; i < size; ++i) N.row(i).head(i) = pk.row(i).head(i).cwiseProduct(mask.G(i));
  }

  // (I + N) u = v - A_{t-1} (p S_0) + b_{t-1} (p M_0)
  template <class Size>
  void solve_u(const Head<Scalar>& x, Index t0, Size size, const MatrixRef<Scalar>& S,
               const MatrixRef<Scalar>& M) {
    u.topRows(size).noalias() = p.topRows(size) * S;
    pM.topRows(size).noalias() = p.topRows(size) * M;
    for (Index i = 0; i < size; ++i)
      u.row(i) = x.v.row(t0 + i) - mask.A(i) * u.row(i) + mask.b(i) * pM.row(i);
    solve_unit_lower(N.topLeftCorner(size, size), u.topRows(size));
  }

  // Q, from the mask.
  template <class Size>
  void form_Q(Size size) {
    qk.topLeftCorner(size, size).noalias() = q.topRows(size) * kt.topRows(size).transpose();
    for (Index i = 0; i < size; ++i) Q.row(i).head(i + 1) = qk.row(i).head(i + 1).cwiseProduct(mask.G(i + 1));
  }

  // o = A_t (q S_0) - b_t (q M_0) + Q u
  template <class Size>
  void read_o(Size size, const MatrixRef<Scalar>& S, const MatrixRef<Scalar>& M) {
    o.topRows(size).noalias() = q.topRows(size) * S;
    qM.topRows(size).noalias() = q.topRows(size) * M;
    for (Index i = 0; i < size; ++i) o.row(i) = mask.A(i + 1) * o.row(i) - mask.b(i + 1) * qM.row(i);
    add_lower_product(Q.topLeftCorner(size, size), u.topRows(size), o.topRows(size));
  }

  // S_n = A_n S_0 - b_n M_0 + (kt .* G_n)^T u and M_n = m_n M_0 - (kt .* D_n)^T u
  template <class Size>
  void carry(Size size, MatrixRef<Scalar> S, MatrixRef<Scalar> M) {
    const Index n = size;
    kG.topRows(size) = kt.topRows(size).array().colwise() * mask.G(n).transpose().array();
    kD.topRows(size) = kt.topRows(size).array().colwise() * mask.D(n).transpose().array();
    S = mask.A(n) * S - mask.b(n) * M;
    S.noalias() += kG.topRows(size).transpose() * u.topRows(size);
    M *= mask.m(n);
    M.noalias() -= kD.topRows(size).transpose() * u.topRows(size);
  }
};

// ChunkSize: the number of tokens in a full chunk if known at compile time, else Eigen::Dynamic.
template <class Scalar, int ChunkSize = Eigen::Dynamic>
class ChunkForward {
 public:
  ChunkForward(Index chunk_size, Index K, Index V) : chunk_size_(chunk_size), c_(chunk_size, K, V) {}

  // S, M: in, the state before the first token; out, after the last. o: T x V, assigned. record: see
  // saved.hpp.
  template <class Record>
  void operator()(const Head<Scalar>& x, MatrixRef<Scalar> S, MatrixRef<Scalar> M, RowsMap<Scalar> o,
                  const Record& record) {
    const auto chunk = [&](Index t0, auto size) {
      if (record.wants_state(t0)) record.state(t0, 0, S, M);
      c_.load(x, t0, size);
      c_.form_N(size);
      c_.solve_u(x, t0, size, S, M);
      c_.form_Q(size);
      c_.read_o(size, S, M);
      c_.carry(size, S, M);
      record.u(t0, 0, c_.u.topRows(size));
      o.middleRows(t0, size) = c_.o.topRows(size);
    };
    for (Index t = 0; t < x.T(); t += chunk_size_) {
      const Index left = x.T() - t;
      if (ChunkSize != Eigen::Dynamic && left >= ChunkSize) {
        chunk(t, Eigen::fix<ChunkSize>);
      } else {
        chunk(t, std::min(left, chunk_size_));
      }
    }
  }

 private:
  Index chunk_size_;
  Chunk<Scalar> c_;
};

}  // namespace momentum_delta::detail
