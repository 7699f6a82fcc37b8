/// \file
/// Every exponential of a decay in this library. Gates are natural logs.
///
/// In a chunk of n tokens, t and j count from 1 and 0 stands for "before the chunk". For j <= t
///
///     d_tj = log_mu_{j+1} + .. + log_mu_t        <= 0 for gates <= 0, and d_tt = 0
///     D_tj = exp(d_tj)                           what is left at t of what entered M at j
///     G_tj = alpha_t G_{t-1,j} + beta_t D_tj     what of it is in S at t; G_{j-1,j} = 0 for j >= 1, G_00 = 0
///     A_t  = exp(log_alpha_1 + .. + log_alpha_t) what is left at t of S before the chunk
///
/// Column 0 is what happens to M before the chunk: D_t0 is left of it, and G_t0 of it has entered S.
/// The sums run forward from j and nothing is subtracted from them, so a reset is -inf (never inf - inf), the
/// diagonal is exactly 0, and no exponent is the difference of two large numbers. There is no logarithm,
/// division or epsilon. (Unrolling M_t = mu_t M_{t-1} - kt_t^T u_t and S_t = alpha_t S_{t-1} - beta_t M_t
/// gives the above.)
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "momentum_delta/detail/panel.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// log of the smallest normal number.
template <class Real>
inline constexpr Real lowest_exponent =
    (std::numeric_limits<Real>::min_exponent - 1) * std::numbers::ln2_v<Real>;

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// exp(x) of a log gate or a sum of log gates (natural logs), with exactly 0 at -inf. A decay below the
/// smallest normal number is exactly 0 as well: the same rule for scalars and arrays, and no subnormal slows
/// the kernels down.
template <class Scalar>
Scalar decay(const Scalar& x) {
  using std::exp, std::real;
  return real(x) < detail::lowest_exponent<detail::Real<Scalar>> ? Scalar(0) : exp(x);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// exp of floats, for |x| < 200, in double: exp(x) = 2^n exp(r), |r| <= ln 2 / 2, by the series of exp, of
// which what is omitted is below r^9 / 9! < 2e-10. Rounded to float that is within 0.51 units in the last
// place. (Eigen's own float exp has up to 2.5 with AVX-512, always the same for the same gate, and constant
// gates add it up from chunk to chunk.)
inline Numbers<double, 16> exp_of_floats(const Row<float>& x) {
  using Array = Numbers<double, 16>;
  constexpr double to_integer = 0x1.8p52;  // added to a number, it leaves the number rounded in the low bits
  const Array wide = x.cast<double>();
  const Array shifted = wide * std::numbers::log2e + to_integer;
  const Array r = wide - (shifted - to_integer) * std::numbers::ln2;
  Array y = 1. / 40320 * r + 1. / 5040;
  for (const double c : {1. / 720, 1. / 120, 1. / 24, 1. / 6, 1. / 2, 1., 1.}) y = y * r + c;
  for (int i = 0; i < 16; ++i)
    y[i] = std::bit_cast<double>(std::bit_cast<std::uint64_t>(y[i]) +
                                 (std::bit_cast<std::uint64_t>(shifted[i]) << 52));
  return y;
}

// decay(x) lane by lane. Eigen's vectorised exp is not 0 at -inf (5.6e-309 in double), so that end is set
// here.
template <class Scalar>
Row<Scalar> decay_row(const Row<Scalar>& x) {
  Row<Scalar> y;
  if constexpr (std::is_same_v<Scalar, float>)
    y = exp_of_floats(x.max(lowest_exponent<float>).min(199.f)).template cast<float>();
  else if constexpr (std::is_same_v<Scalar, double>)
    y = x.exp();
  else
    for (int i = 0; i < panel_width<Scalar>; ++i) y[i] = decay(x[i]);
  if constexpr (std::is_floating_point_v<Scalar>)
    return by_lane<Scalar>([&](int i) { return x[i] < lowest_exponent<Scalar> ? Scalar(0) : y[i]; });
  else
    return y;
}
// Whole rows, the last one padded: the result depends on x alone, not on where it stands.
template <class Scalar>
void decay_row(const Scalar* x, Scalar* y, Index n) {
  for (Index i = 0; i < n; i += panel_width<Scalar>) {
    const Index width = std::min<Index>(panel_width<Scalar>, n - i);
    store_row(decay_row<Scalar>(load_row<Scalar>(x + i, width)), y + i, width);
  }
}

// The selective scan decays by exp(dt A), dt >= 0 and A in [-inf, 0], for many A and channels a token. Its
// exponent is formed here, from dt and what decay_rate makes of A: for float log2(e) A, so that a power of 2
// is all that is left to do. A below 2^-28 of the lowest finite number, -1.3e30 in float, counts as that: the
// decay is 0 for every dt that a model can have (dt > 7e-29 in float), and 1 for dt = 0, no time at all, as
// for every other A; and dt A does not overflow (dt < 1.8e8).
template <class Real>
inline constexpr Real lowest_rate = std::numeric_limits<Real>::lowest() * Real(0x1p-28);

template <class Scalar>
Scalar decay_rate(const Scalar& A) {
  using std::real;
  constexpr Real<Scalar> lowest = lowest_rate<Real<Scalar>>;
  const Scalar rate = real(A) < lowest ? Scalar(lowest) : A;
  return std::is_same_v<Scalar, float> ? rate * Scalar(std::numbers::log2e_v<Real<Scalar>>) : rate;
}

#if defined(__GNUC__)
// Powers of 2 for |f| <= 1 / (2 octave_parts), by 2^(n + j / octave_parts + f) = 2^n T (1 + f q(f)) with
// T = 2^(j / octave_parts), where q approximates (2^f - 1) / f: what that leaves out is below 6e-9. The
// result is within 1 unit in the last place (1.25 without fused multiply-add), and within 0.6 from 2^(-1/32)
// to 1, where long memories multiply it many times over. Where one instruction looks T up, parts of an octave
// spare three terms of q. n and j: in the low bits of `shifted`. Where `normal` is not set, the result is 0
// and no arithmetic is done on bits that mean nothing.
#ifdef __AVX512F__
inline constexpr int octave_parts = 16;
// T, less j where the bits of n and j will be added.
alignas(64) inline constexpr std::int32_t octave[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

EIGEN_ALWAYS_INLINE Floats power_of_two(const Floats& shifted, const Floats& f, const Ints& normal) {
  const Floats q = (0.05550346151f * f + 0.2402342707f) * f + 0.6931471825f;
  const auto part = (Ints)_mm512_permutexvar_epi32((__m512i)shifted, _mm512_load_si512(octave));
  const Floats power = (Floats)(normal ? part + ((Ints)shifted << 19) : Ints{});
  return f * q * power + power;
}
#else
inline constexpr int octave_parts = 1;

EIGEN_ALWAYS_INLINE Floats power_of_two(const Floats& shifted, const Floats& f, const Ints& normal) {
  Floats p = 0.0001545316295f * f + 0.001339086336f;
  p = p * f + 0.009618082557f;
  p = p * f + 0.05550357114f;
  p = p * f + 0.2402265076f;
  p = p * f + 0.693147188f;
  p = p * f + 1.f;
  return (Floats)(normal ? (Ints)p + ((Ints)shifted << 23) : Ints{});
}
#endif

// Added to a number, it leaves it rounded to parts of an octave in the low bits.
inline constexpr float to_parts = 0x1.8p23f / octave_parts;

// 2^y, y <= 0; 0 below the smallest normal number, where the series means nothing.
EIGEN_ALWAYS_INLINE Floats power_of_two(Floats y) {
  const Floats shifted = y + to_parts;
  return power_of_two(shifted, y - (shifted - to_parts), y >= -126.f);
}
#endif

// exp(dt A) lane by lane.
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> decay_row(const Row<Scalar>& dt, const Row<Scalar>& rate) {
  if constexpr (std::is_same_v<Scalar, float>) {
#if defined(__GNUC__)
    return by_vector([](const Floats& dt_i, const Floats& rate_i)
                         MOMENTUM_DELTA_INLINE { return power_of_two(dt_i * rate_i); },
                     dt, rate);
#else
    return by_lane<float>([&](int i) { return dt[i] * rate[i] < -126.f ? 0.f : std::exp2(dt[i] * rate[i]); });
#endif
  } else {
    return decay_row<Scalar>(Row<Scalar>(dt * rate));
  }
}

// decay(x) lane by lane for x <= 0, in float faster than decay_row and within 1.5 units in the last place. It
// reduces x by n ln 2 with ln 2 in two parts, the first short enough for an exact product.
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> fast_decay_row(const Row<Scalar>& x) {
#if defined(__GNUC__)
  if constexpr (std::is_same_v<Scalar, float>) {
    return by_vector(
        [](const Floats& x_i) MOMENTUM_DELTA_INLINE {
          constexpr float log2e = std::numbers::log2e_v<float>;
          const Ints normal = x_i >= lowest_exponent<float>;
          const Floats x_n = normal ? x_i : Floats{};  // -inf would be no number below
          const Floats shifted = x_n * log2e + to_parts, n = shifted - to_parts;
          const Floats f = ((x_n - n * 0.693359375f) + n * 2.12194440e-4f) * log2e;
          return power_of_two(shifted, f, normal);
        },
        x);
  }
#endif
  return decay_row<Scalar>(x);
}

// Segment sums of a chunk, in place, from its end backwards: row i of n becomes `after` and the rows after
// row i; returns `after` and all rows. Nothing is subtracted from a sum.
template <class Scalar>
Row<Scalar> sums_to_end(Index n, Scalar* rows, Row<Scalar> after) {
  for (Index i = n; i-- > 0;) {
    const Row<Scalar> row = aligned_row(rows + i * panel_width<Scalar>);
    aligned_row(rows + i * panel_width<Scalar>) = after;
    after += row;
  }
  return after;
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// The decays of one chunk of n tokens, and their gradients, by the formulas at the head of this file:
/// t from 0 to n, where 0 is "before the chunk". Rows over the tokens j from 1 to t have j = 1 at element 0
/// and are padded with 0 to a multiple of the panel width.
template <class Scalar>
class DecayMask {
 public:
  /// Room for chunks of up to `chunk_size` tokens, taken from the arena, whose memory must outlive the mask.
  DecayMask(detail::Arena& arena, Index chunk_size)
      : stride_(detail::padded<Scalar>(chunk_size)),
        log_(arena.take<Scalar>(stride_)),
        alpha_(arena.take<Scalar>(stride_ + 1)),
        beta_(arena.take<Scalar>(stride_ + 1)),
        A_(arena.take<Scalar>(stride_ + 1)),
        m_(arena.take<Scalar>(stride_ + 1)),
        b_(arena.take<Scalar>(stride_ + 1)),
        D_(arena.take<Scalar>((chunk_size + 1) * stride_)),
        G_(arena.take<Scalar>((chunk_size + 1) * stride_)) {}

  /// Computes all of it. log_alpha, log_mu (natural logs), beta: the gates of the chunk's tokens, callable
  /// with 0 <= i < n; n is at most chunk_size.
  template <class LogAlpha, class LogMu, class Beta>
  void build(Index n, const LogAlpha& log_alpha, const LogMu& log_mu, const Beta& beta) {
    for (Index i = 0; i < n; ++i) log_[i] = log_alpha(i);
    detail::decay_row(log_, alpha_ + 1, n);
    for (Index i = 1; i < n; ++i) log_[i] += log_[i - 1];
    detail::decay_row(log_, A_ + 1, n);
    for (Index i = 0; i < n; ++i) log_[i] = log_mu(i) + (i > 0 ? log_[i - 1] : Scalar(0));
    detail::decay_row(log_, m_ + 1, n);
    A_[0] = m_[0] = Scalar(1);
    b_[0] = Scalar(0);
    std::fill(A_ + n + 1, A_ + stride_ + 1, Scalar(0));
    std::fill(b_ + n + 1, b_ + stride_ + 1, Scalar(0));

    const Scalar never = -std::numeric_limits<detail::Real<Scalar>>::infinity();
    for (Index t = 1; t <= n; ++t) {
      beta_[t] = beta(t - 1);
      b_[t] = next_b(t);
      // log_: d_tj of the tokens so far, -inf of those to come.
      if ((t - 1) % W == 0) {
        detail::aligned_row(log_ + t - 1) = Row::Constant(never);
        detail::aligned_row(G_ + (t - 1) * stride_ + t - 1) = Row::Zero();
      }
      const Scalar log_mu_t = log_mu(t - 1);
      for (Index j = 0; j < t; j += W) {
        Row d = detail::aligned_row(log_ + j) + log_mu_t;
        if (j + W >= t) d = detail::with_lane<Scalar>(d, t - 1 - j, Scalar(0));
        const Row D = detail::decay_row<Scalar>(d);
        detail::aligned_row(log_ + j) = d;
        detail::aligned_row(D_ + t * stride_ + j) = D;
        detail::aligned_row(G_ + t * stride_ + j) = detail::multiply_add<Scalar>(
            Row::Constant(alpha_[t]), detail::aligned_row(G_ + (t - 1) * stride_ + j), beta_[t] * D);
      }
    }
  }

  Scalar A(Index t) const { return A_[t]; }  ///< what is left of S_0; A(0) = 1
  Scalar m(Index t) const { return m_[t]; }  ///< what is left of M_0, D_t0; m(0) = 1
  Scalar b(Index t) const { return b_[t]; }  ///< how much of M_0 has entered S, G_t0; b(0) = 0
  const Scalar* D(Index t) const { return D_ + t * stride_; }  ///< D_t1 .. D_tt, 0 ..; t >= 1
  const Scalar* G(Index t) const { return G_ + t * stride_; }  ///< G_t1 .. G_tt, 0 ..; t >= 1
  const Scalar* A_from(Index t) const { return A_ + t; }       ///< A_t, A_{t+1} .. A_n, 0 ..
  const Scalar* b_from(Index t) const { return b_ + t; }       ///< b_t, b_{t+1} .. b_n, 0 ..
  Index stride() const { return stride_; }                     ///< elements from one row to the next

  /// Gradients of a loss by the mask. Rows as above: elements past the diagonal must be 0.
  struct Gradients {
    Scalar *A,  ///< n + 1: by A_t; entry 0 is not read (it is a constant)
        *b;     ///< n + 1: by b_t; entry 0 is not read (it is a constant)
    Scalar* G;  ///< n + 1 x stride: by G_tj; row 0 is not read
    Scalar* D;  ///< stride: by D_nj; earlier rows of D reach nothing but G
    Scalar m;   ///< by m_n

    /// Room for chunks of up to `chunk_size` tokens, not initialised.
    Gradients(detail::Arena& arena, Index chunk_size)
        : A(arena.take<Scalar>(chunk_size + 1)),
          b(arena.take<Scalar>(chunk_size + 1)),
          G(arena.take<Scalar>((chunk_size + 1) * detail::padded<Scalar>(chunk_size))),
          D(arena.take<Scalar>(detail::padded<Scalar>(chunk_size))) {}
  };

  /// Gradients by the gates (natural logs; 0 where a log gate is -inf) of the last build() from those by
  /// the mask, which become running adjoints: the scans above in reverse, t from n to 1. put(i, dlog_alpha,
  /// dlog_mu, dbeta) is called for each token i of the chunk, last one first.
  template <class Put>
  void backward(Index n, Gradients& g, const Put& put) const {
    using detail::aligned_row;
    Scalar gA = Scalar(0);
    for (Index t = n; t >= 1; --t) {
      Scalar* const gG = g.G + t * stride_;
      Scalar* const gG_before = gG - stride_;
      const Scalar alpha = alpha_[t];
      const Scalar mu = t > 1 ? D(t)[t - 2] : m_[1];
      gA += g.A[t];
      g.m += beta_[t] * g.b[t];

      Row dbeta = Row::Zero(), dalpha = Row::Zero(), dmu = Row::Zero();
      for (Index j = 0; j < t; j += W) {
        Row gG_j = aligned_row(gG + j);
        Row gD_j = aligned_row(g.D + j) + beta_[t] * gG_j;
        dbeta += gG_j * aligned_row(D(t) + j);
        if (j + W < t) {
          dalpha += gG_j * aligned_row(G(t - 1) + j);
          dmu += gD_j * aligned_row(D(t - 1) + j);
          aligned_row(gG_before + j) += alpha * gG_j;
          aligned_row(g.D + j) = mu * gD_j;
        } else {  // token t, which entered here, has nothing before it
          const Index own = t - 1 - j;
          const Row earlier_G = detail::first_lanes<Scalar>(gG_j, own);
          const Row earlier_D = detail::first_lanes<Scalar>(gD_j, own);
          if (own > 0) {
            dalpha += earlier_G * aligned_row(G(t - 1) + j);
            dmu += earlier_D * aligned_row(D(t - 1) + j);
            aligned_row(gG_before + j) += alpha * earlier_G;
          }
          aligned_row(g.D + j) = detail::with_lane<Scalar>(mu * gD_j, own, gD_j[int(own)]);
        }
      }
      put(t - 1, alpha * (detail::lane_sum<Scalar>(dalpha) + g.b[t] * b_[t - 1] + gA * A_[t - 1]),
          mu * (detail::lane_sum<Scalar>(dmu) + g.m * m_[t - 1]),
          detail::lane_sum<Scalar>(dbeta) + g.b[t] * m_[t]);

      g.b[t - 1] += alpha * g.b[t];
      gA *= alpha;
      g.m *= mu;
    }
  }

 private:
  static constexpr int W = detail::panel_width<Scalar>;
  using Row = detail::Row<Scalar>;

  // Not inlined, for build() is a function for each kind of gates, and a compiler would round the one product
  // in some and the other in others.
  EIGEN_DONT_INLINE Scalar next_b(Index t) const { return alpha_[t] * b_[t - 1] + beta_[t] * m_[t]; }

  Index stride_;
  Scalar* log_;                           // chunk_size
  Scalar *alpha_, *beta_, *A_, *m_, *b_;  // chunk_size + 1
  Scalar *D_, *G_;                        // chunk_size + 1 x stride
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
