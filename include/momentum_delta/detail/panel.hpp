/// \file
/// The unit of the fast kernels: a row of one cache line. A panel is a K x W or n x W matrix of such rows,
/// contiguous, whose columns past the tensor's edge are 0.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "momentum_delta/detail/convert.hpp"
#include "momentum_delta/types.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar>
inline constexpr int panel_width = std::max<int>(1, 64 / int(sizeof(Scalar)));

// n numbers with no alignment of their own: that of Eigen's fixed-size arrays depends on the instruction set,
// and with it whether Eigen's inline functions on them, which all translation units share, may be mixed.
template <class Scalar, int n>
using Numbers = Eigen::Array<Scalar, 1, n, (n == 1 ? Eigen::ColMajor : Eigen::RowMajor) | Eigen::DontAlign>;

template <class Scalar>
using Row = Numbers<Scalar, panel_width<Scalar>>;

// Rows of a tile: as many as leave registers to spare for the other operand. (With 8 rows of 64 bytes, AVX2's
// sixteen registers of 32 bytes would not suffice.)
#ifdef EIGEN_VECTORIZE_AVX512
inline constexpr int tile_rows = 8;
#else
inline constexpr int tile_rows = 4;
#endif

constexpr Index round_up(Index size, Index multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// Fetches a cache line that will be used soon.
EIGEN_ALWAYS_INLINE void prefetch([[maybe_unused]] const void* line) {
#if defined(__GNUC__)
  __builtin_prefetch(line);
#endif
}

// A number of tokens or channels in whole tiles and rows.
template <class Scalar>
constexpr Index padded(Index size) {
  return round_up(size, std::max(panel_width<Scalar>, tile_rows));
}

// A row of a panel, aligned.
template <class Scalar>
Eigen::Map<Row<std::remove_const_t<Scalar>>, Eigen::AlignedMax> aligned_row(Scalar* row) {
  return Eigen::Map<Row<Scalar>, Eigen::AlignedMax>(row);
}
template <class Scalar>
Eigen::Map<const Row<Scalar>, Eigen::AlignedMax> aligned_row(const Scalar* row) {
  return Eigen::Map<const Row<Scalar>, Eigen::AlignedMax>(row);
}

// `width` <= W elements of memory as a row, 0 after them.
template <class Scalar, class Storage>
EIGEN_ALWAYS_INLINE Row<Scalar> load_row(const Storage* from, Index width) {
  Row<Scalar> row;
  if (width == panel_width<Scalar>) {
    if constexpr (std::is_same_v<Scalar, Storage>)
      row = Eigen::Map<const Row<Scalar>>(from);
    else
      convert(from, row.data(), panel_width<Scalar>);
  } else {
    row.setZero();
    convert(from, row.data(), width);
  }
  return row;
}

// The first `width` <= W elements of a row to memory.
template <class Storage, class Scalar>
EIGEN_ALWAYS_INLINE void store_row(const Row<Scalar>& row, Storage* to, Index width) {
  if (width == panel_width<Scalar>) {
    if constexpr (std::is_same_v<Scalar, Storage>)
      Eigen::Map<Row<Scalar>>{to} = row;
    else
      convert(row.data(), to, panel_width<Scalar>);
  } else {
    convert(row.data(), to, width);
  }
}

// f(i) in lane i. (Compilers vectorise such a loop; Eigen 3.4 does not vectorise select.)
template <class Scalar, class F>
EIGEN_ALWAYS_INLINE Row<Scalar> by_lane(const F& f) {
  Row<Scalar> row;
  for (int i = 0; i < panel_width<Scalar>; ++i) row[i] = f(i);
  return row;
}
// The row with another value in one lane.
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> with_lane(const Row<Scalar>& row, Index lane, Scalar value) {
  return by_lane<Scalar>([&, l = int(lane)](int i) { return i == l ? value : row[i]; });
}
// The row with 0 in its lanes from `count` on, whatever is there.
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> first_lanes(const Row<Scalar>& row, Index count) {
  return by_lane<Scalar>([&, n = int(std::min<Index>(count, panel_width<Scalar>))](int i) {
    return i < n ? row[i] : Scalar(0);
  });
}

// Is x_i > y_i in some lane? (AVX-512 compares in one instruction; compilers reduce lane by lane.)
template <class Scalar>
EIGEN_ALWAYS_INLINE bool any_greater(const Row<Scalar>& x, const Row<Scalar>& y) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<Scalar, float>)
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(x.data()), _mm512_loadu_ps(y.data()), _CMP_GT_OQ) != 0;
  if constexpr (std::is_same_v<Scalar, double>)
    return _mm512_cmp_pd_mask(_mm512_loadu_pd(x.data()), _mm512_loadu_pd(y.data()), _CMP_GT_OQ) != 0;
#endif
  bool any = false;
  for (int i = 0; i < panel_width<Scalar>; ++i) any |= x[i] > y[i];
  return any;
}

// The sum of all lanes, by halves.
template <class Scalar>
EIGEN_ALWAYS_INLINE Scalar lane_sum(Row<Scalar> row) {
  for (int half = panel_width<Scalar> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) row[i] += row[i + half];
  return row[0];
}

// a b + c with one rounding where the target can: of a b + c d a compiler rounds either product, and not the
// same one in every place.
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> multiply_add(const Row<Scalar>& a, const Row<Scalar>& b,
                                             const Row<Scalar>& c) {
  using Packet = typename Eigen::internal::packet_traits<Scalar>::type;
  Row<Scalar> y;
  for (int i = 0; i < panel_width<Scalar>; i += Eigen::internal::packet_traits<Scalar>::size)
    Eigen::internal::pstoreu(y.data() + i,
                             Eigen::internal::pmadd(Eigen::internal::ploadu<Packet>(a.data() + i),
                                                    Eigen::internal::ploadu<Packet>(b.data() + i),
                                                    Eigen::internal::ploadu<Packet>(c.data() + i)));
  return y;
}

// n rows of memory, columns from `column` on, as a panel, with 0 in its rows from n to `rows`.
template <class Scalar, class Rows>
void load_rows(const Rows& from, Index t0, Index n, Index column, Index width, Index rows, Scalar* panel) {
  constexpr Index W = panel_width<Scalar>;
  for (Index i = 0; i < n; ++i)
    aligned_row(panel + i * W) =
        load_row<Scalar>(from.data() + (t0 + i) * from.outerStride() + column, width);
  for (Index i = n; i < rows; ++i) aligned_row(panel + i * W).setZero();
}

// For a lambda on unroll(): inlined, so that the rows of a Tile it indexes stay in registers.
#if defined(__GNUC__)
#define MOMENTUM_DELTA_INLINE __attribute__((always_inline))
#else
#define MOMENTUM_DELTA_INLINE
#endif

// f(0), f(1), .. f(N - 1) with constants, inlined. (g++ unrolls loops too late to keep what they index in
// registers.)
template <int N, class F>
EIGEN_ALWAYS_INLINE void unroll(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) MOMENTUM_DELTA_INLINE {
    (f(std::integral_constant<int, i>{}), ...);
  }
  (std::make_integer_sequence<int, N>{});
}

#if defined(__GNUC__)
// f(x) a vector register at a time, f from and to Floats.
template <class F, class... Rows>
EIGEN_ALWAYS_INLINE Row<float> by_vector(const F& f, const Rows&... x) {
  const auto part = [](const Row<float>& row, int i) MOMENTUM_DELTA_INLINE {
    Floats floats;
    std::memcpy(&floats, row.data() + i, sizeof floats);
    return floats;
  };
  Row<float> y;
  for (int i = 0; i < panel_width<float>; i += vector_lanes) {
    const Floats y_i = f(part(x, i)...);
    std::memcpy(y.data() + i, &y_i, sizeof y_i);
  }
  return y;
}

// Lanes of a and b: lane which(i) of the 2 vector_lanes that they have, in lane i.
template <class Which>
EIGEN_ALWAYS_INLINE Floats shuffle(const Floats& a, const Floats& b, const Which& which) {
  return [&]<int... i>(std::integer_sequence<int, i...>) MOMENTUM_DELTA_INLINE {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, Which{}(i)...);
#else
    return __builtin_shuffle(a, b, Ints{Which{}(i)...});
#endif
  }
  (std::make_integer_sequence<int, vector_lanes>{});
}

// Sums of lanes `apart`, a power of 2: of a in the lanes whose number has not that bit, of b in the others.
// (Two choices by lane and one exchange of lanes, which most processors do fewer of at a time.)
template <int apart>
EIGEN_ALWAYS_INLINE Floats add_lanes(const Floats& a, const Floats& b) {
  const auto of_own = [](int i) { return i & apart ? i + vector_lanes : i; };
  const auto of_other = [](int i) { return i & apart ? i : i + vector_lanes; };
  const auto exchanged = [](int i) { return i ^ apart; };
  const Floats other = shuffle(a, b, of_other);
  return shuffle(a, b, of_own) + shuffle(other, other, exchanged);
}
// Sums of the n rows row(i) from `first` on, that of row first + i in the lanes whose number is i modulo n:
// in parts, which together are the sum.
template <int n, class RowOf>
EIGEN_ALWAYS_INLINE Floats partial_sums(const RowOf& row, Index first) {
  if constexpr (n > 1) {
    return add_lanes<n / 2>(partial_sums<n / 2>(row, first), partial_sums<n / 2>(row, first + n / 2));
  } else {
    const Row<float> row_i = row(first);
    Floats sum{};
    for (int i = 0; i < panel_width<float>; i += vector_lanes) {
      Floats part;
      std::memcpy(&part, row_i.data() + i, sizeof part);
      sum += part;
    }
    return sum;
  }
}
#endif

// yes where x > 0, else no. (Eigen 3.4 does not vectorise select.)
template <class Scalar>
EIGEN_ALWAYS_INLINE Row<Scalar> where_positive(const Row<Scalar>& x, const Row<Scalar>& yes,
                                               const Row<Scalar>& no) {
#if defined(__GNUC__)
  if constexpr (std::is_same_v<Scalar, float>)
    return by_vector([](const Floats& x_i, const Floats& yes_i, const Floats& no_i)
                         MOMENTUM_DELTA_INLINE { return x_i > 0 ? yes_i : no_i; },
                     x, yes, no);
#endif
  return by_lane<Scalar>([&](int i) { return x[i] > 0 ? yes[i] : no[i]; });
}

// to_ji = from_ij for rows x cols elements, both multiples of the panel width.
template <class Scalar>
void transpose(const Scalar* from, Index from_stride, Index rows, Index cols, Scalar* to, Index to_stride) {
  constexpr int P = Eigen::internal::packet_traits<Scalar>::size;  // what Eigen transposes in registers
  Eigen::Array<Scalar, P, P, (P == 1 ? Eigen::ColMajor : Eigen::RowMajor) | Eigen::DontAlign> block;
  for (Index i = 0; i < rows; i += P) {
    for (Index j = 0; j < cols; j += P) {
      using BlockRow = Numbers<Scalar, P>;
      for (int r = 0; r < P; ++r) block.row(r) = Eigen::Map<const BlockRow>(from + (i + r) * from_stride + j);
      block.transposeInPlace();
      for (int r = 0; r < P; ++r) Eigen::Map<BlockRow>(to + (j + r) * to_stride + i) = block.row(r);
    }
  }
}

// Sums over the lanes of the W rows row(i), that of row i in lane i.
template <class Scalar, class RowOf>
EIGEN_ALWAYS_INLINE Row<Scalar> lane_sums(const RowOf& row) {
  constexpr int W = panel_width<Scalar>;
#if defined(__GNUC__)
  if constexpr (std::is_same_v<Scalar, float>) {
    Row<float> sums;
    for (int i = 0; i < W; i += vector_lanes) {
      const Floats part = partial_sums<vector_lanes>(row, i);
      std::memcpy(sums.data() + i, &part, sizeof part);
    }
    return sums;
  }
#endif
  alignas(64) Scalar rows[W * W], columns[W * W];
  for (int i = 0; i < W; ++i) aligned_row(rows + i * W) = row(i);
  transpose(rows, W, W, W, columns, W);
  Row<Scalar> even = Row<Scalar>::Zero(), odd = Row<Scalar>::Zero();
  for (int i = 0; i + 1 < W; i += 2) {
    even += aligned_row(columns + i * W);
    odd += aligned_row(columns + (i + 1) * W);
  }
  return even + odd;
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
