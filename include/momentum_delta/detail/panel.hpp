/// \file
/// The unit of the fast kernels: a row of one cache line, and the tile of rows that a product keeps in
/// registers. A panel is a K x W or n x W matrix of such rows, contiguous, whose columns past the tensor's
/// edge are 0.
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
inline void prefetch([[maybe_unused]] const void* line) {
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

// Sums of neighbouring lanes, first those of a.
EIGEN_ALWAYS_INLINE Floats add_neighbours(const Floats& a, const Floats& b) {
  return [&]<int... i>(std::integer_sequence<int, i...>) MOMENTUM_DELTA_INLINE {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (2 * i)...) + __builtin_shufflevector(a, b, (2 * i + 1)...);
#else
    return __builtin_shuffle(a, b, Ints{(2 * i)...}) + __builtin_shuffle(a, b, Ints{(2 * i + 1)...});
#endif
  }
  (std::make_integer_sequence<int, vector_lanes>{});
}
// Partial sums of n rows, vector_lanes / n of each, one row after the other.
template <int n>
EIGEN_ALWAYS_INLINE Floats partial_sums(const float* rows) {
  constexpr int W = panel_width<float>;
  if constexpr (n > 1) {
    return add_neighbours(partial_sums<n / 2>(rows), partial_sums<n / 2>(rows + n / 2 * W));
  } else {
    Floats sum{};
    for (int i = 0; i < W; i += vector_lanes) {
      Floats part;
      std::memcpy(&part, rows + i, sizeof part);
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

// Rows of panels next to each other, `between` elements apart.
template <class T>
struct PanelRows {
  T* data;
  Index between;

  EIGEN_ALWAYS_INLINE PanelRows(T* rows, Index distance = 0) : data(rows), between(distance) {}
  // of const T, from those of T
  template <class U>
  EIGEN_ALWAYS_INLINE PanelRows(const PanelRows<U>& rows) : data(rows.data), between(rows.between) {}
  EIGEN_ALWAYS_INLINE PanelRows operator+(Index offset) const { return {data + offset, between}; }
};

// Panels that a product takes together, where their rows all fit in registers: an element of the other operand
// is loaded once for them.
#ifdef EIGEN_VECTORIZE_AVX512
inline constexpr int panels_together = 2;
#else
inline constexpr int panels_together = 1;
#endif

// visit(P, i) for i = 0, step, 2 step, .. below `end`, of which each visit takes P, a constant.
template <class Visit>
EIGEN_ALWAYS_INLINE void by_panels(Index end, Index step, const Visit& visit) {
  Index i = 0;
  for (; panels_together > 1 && i + step < end; i += panels_together * step)
    visit(std::integral_constant<int, panels_together>{}, i);
  for (; i < end; i += step) visit(std::integral_constant<int, 1>{}, i);
}

// The rows of a product in P panels, in registers: Eigen's packets, since nothing larger is sure to stay there.
template <class Scalar, int P = 1>
class Tile {
 public:
  EIGEN_ALWAYS_INLINE Row<Scalar> row(int i, int panel = 0) const {
    Row<Scalar> row;
    unroll<parts>([&](auto p) MOMENTUM_DELTA_INLINE {
      Eigen::internal::pstoreu(row.data() + p * size, packet_[i][panel][p]);
    });
    return row;
  }
  EIGEN_ALWAYS_INLINE void set_row(int i, int panel, const Row<Scalar>& row) {
    unroll<parts>([&](auto p) MOMENTUM_DELTA_INLINE {
      packet_[i][panel][p] = Eigen::internal::ploadu<Packet>(row.data() + p * size);
    });
  }

  EIGEN_ALWAYS_INLINE void set_zero() {
    each([&](auto i, auto panel, auto p)
             MOMENTUM_DELTA_INLINE { packet_[i][panel][p] = Eigen::internal::pset1<Packet>(Scalar(0)); });
  }
  // From and to rows at `rows`, `stride` apart.
  EIGEN_ALWAYS_INLINE void load(const PanelRows<const Scalar>& rows, Index stride) {
    each([&](auto i, auto panel, auto p) MOMENTUM_DELTA_INLINE {
      packet_[i][panel][p] =
          Eigen::internal::pload<Packet>(rows.data + panel * rows.between + i * stride + p * size);
    });
  }
  EIGEN_ALWAYS_INLINE void store(const PanelRows<Scalar>& rows, Index stride) const {
    each([&](auto i, auto panel, auto p) MOMENTUM_DELTA_INLINE {
      Eigen::internal::pstore(rows.data + panel * rows.between + i * stride + p * size, packet_[i][panel][p]);
    });
  }
  EIGEN_ALWAYS_INLINE void scale(const Scalar& factor) {
    each([&](auto i, auto panel, auto p) MOMENTUM_DELTA_INLINE {
      packet_[i][panel][p] =
          Eigen::internal::pmul(packet_[i][panel][p], Eigen::internal::pset1<Packet>(factor));
    });
  }

  // row_i += factor x_i, for rows x_i `stride` apart.
  EIGEN_ALWAYS_INLINE void add_scaled(const Scalar& factor, const PanelRows<const Scalar>& x, Index stride) {
    unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE { add(i, factor, PacketRow(x + i * stride)); });
  }
  // row_i += sum_k a[i * i_stride + k * k_stride] b_k, for n rows b_k at b, b_stride apart.
  EIGEN_ALWAYS_INLINE void add(const Scalar* a, Index i_stride, Index k_stride,
                               const PanelRows<const Scalar>& b, Index b_stride, Index n) {
    for (Index k = 0; k < n; ++k) {
      const PacketRow b_k(b + k * b_stride);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE { add(i, a[i * i_stride + k * k_stride], b_k); });
    }
  }
  EIGEN_ALWAYS_INLINE void subtract(const Scalar* a, Index i_stride, Index k_stride,
                                    const PanelRows<const Scalar>& b, Index b_stride, Index n) {
    for (Index k = 0; k < n; ++k) {
      const PacketRow b_k(b + k * b_stride);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE { add(i, -a[i * i_stride + k * k_stride], b_k); });
    }
  }
  // row_i += sum_k a_ik b_k + c_ik d_k, for n rows b_k and d_k of stride W. The coefficients of each k lie
  // together: Rows of a, then Rows of c.
  EIGEN_ALWAYS_INLINE void add_both(const Scalar* coefficients, const PanelRows<const Scalar>& b,
                                    const PanelRows<const Scalar>& d, Index n) {
    constexpr int W = panel_width<Scalar>;
    for (Index k = 0; k < n; ++k) {
      const PacketRow b_k(b + k * W), d_k(d + k * W);
      const Scalar* const a = coefficients + k * 2 * Rows;
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE { add(i, a[i], b_k); });
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE { add(i, a[Rows + i], d_k); });
    }
  }

  // Products with a triangle L_ij = a[i * stride + j], or with its transpose. What it keeps from a row never
  // meets it, not even multiplied by 0.
  // row_i += sum_{j <= i} L_ij b_j
  EIGEN_ALWAYS_INLINE void add_lower(const Scalar* a, Index stride, const PanelRows<const Scalar>& b,
                                     Index b_stride) {
    unroll<Rows>([&](auto j) MOMENTUM_DELTA_INLINE {
      const PacketRow b_j(b + j * b_stride);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i >= j) add(i, a[i * stride + j], b_j);
      });
    });
  }
  // row_i += sum_{j < i} L_ij b_j
  EIGEN_ALWAYS_INLINE void add_strictly_lower(const Scalar* a, Index stride, const PanelRows<const Scalar>& b,
                                              Index b_stride) {
    unroll<Rows>([&](auto j) MOMENTUM_DELTA_INLINE {
      const PacketRow b_j(b + j * b_stride);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i > j) add(i, a[i * stride + j], b_j);
      });
    });
  }
  // row_i += sum_{j >= i} L_ji b_j
  EIGEN_ALWAYS_INLINE void add_lower_transposed(const Scalar* a, Index stride,
                                                const PanelRows<const Scalar>& b, Index b_stride) {
    unroll<Rows>([&](auto j) MOMENTUM_DELTA_INLINE {
      const PacketRow b_j(b + j * b_stride);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i <= j) add(i, a[j * stride + i], b_j);
      });
    });
  }
  // row_i += sum_{j > i} L_ji b_j
  EIGEN_ALWAYS_INLINE void add_strictly_lower_transposed(const Scalar* a, Index stride,
                                                         const PanelRows<const Scalar>& b, Index b_stride) {
    unroll<Rows>([&](auto j) MOMENTUM_DELTA_INLINE {
      const PacketRow b_j(b + j * b_stride);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i < j) add(i, a[j * stride + i], b_j);
      });
    });
  }
  // rows = (I + L)^{-1} rows and (I + L)^{-T} rows, reading L_ij with j < i
  EIGEN_ALWAYS_INLINE void solve_unit_lower(const Scalar* a, Index stride) {
    unroll<Rows>([&](auto j) MOMENTUM_DELTA_INLINE {
      const PacketRow row_j(packet_[j]);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i > j) add(i, -a[i * stride + j], row_j);
      });
    });
  }
  EIGEN_ALWAYS_INLINE void solve_unit_lower_transposed(const Scalar* a, Index stride) {
    unroll<Rows>([&](auto reversed) MOMENTUM_DELTA_INLINE {
      constexpr int j = Rows - 1 - reversed;
      const PacketRow row_j(packet_[j]);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i < j) add(i, -a[j * stride + i], row_j);
      });
    });
  }

 private:
  using Packet = typename Eigen::internal::packet_traits<Scalar>::type;
  static constexpr int Rows = tile_rows;
  static constexpr int size = Eigen::internal::unpacket_traits<Packet>::size;
  static constexpr int parts = panel_width<Scalar> / size;

  // A row that meets all rows of the tile.
  struct PacketRow {
    Packet packet[P][parts];
    EIGEN_ALWAYS_INLINE explicit PacketRow(const PanelRows<const Scalar>& row) {
      each_part([&](auto panel, auto p) MOMENTUM_DELTA_INLINE {
        packet[panel][p] = Eigen::internal::pload<Packet>(row.data + panel * row.between + p * size);
      });
    }
    EIGEN_ALWAYS_INLINE explicit PacketRow(const Packet (&row)[P][parts]) {
      each_part([&](auto panel, auto p) MOMENTUM_DELTA_INLINE { packet[panel][p] = row[panel][p]; });
    }
  };

  EIGEN_ALWAYS_INLINE void add(int i, const Scalar& a, const PacketRow& b) {
    const Packet a_all = Eigen::internal::pset1<Packet>(a);
    each_part([&](auto panel, auto p) MOMENTUM_DELTA_INLINE {
      packet_[i][panel][p] = Eigen::internal::pmadd(a_all, b.packet[panel][p], packet_[i][panel][p]);
    });
  }

  template <class F>
  static EIGEN_ALWAYS_INLINE void each_part(const F& f) {
    unroll<P>([&](auto panel) MOMENTUM_DELTA_INLINE {
      unroll<parts>([&](auto p) MOMENTUM_DELTA_INLINE { f(panel, p); });
    });
  }
  template <class F>
  static EIGEN_ALWAYS_INLINE void each(const F& f) {
    unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
      each_part([&](auto panel, auto p) MOMENTUM_DELTA_INLINE { f(i, panel, p); });
    });
  }

  Packet packet_[Rows][P][parts];
};

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

// Sums over the lanes of W rows, that of row i in lane i.
template <class Scalar>
Row<Scalar> lane_sums(const Scalar* rows) {
  constexpr int W = panel_width<Scalar>;
#if defined(__GNUC__)
  if constexpr (std::is_same_v<Scalar, float>) {
    Row<float> sums;
    for (int i = 0; i < W; i += vector_lanes) {
      const Floats part = partial_sums<vector_lanes>(rows + i * W);
      std::memcpy(sums.data() + i, &part, sizeof part);
    }
    return sums;
  }
#endif
  alignas(64) Scalar columns[W * W];
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
