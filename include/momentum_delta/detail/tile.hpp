/// \file
/// Products: the rows of one or more panels that stay in registers while the other operands pass.
#pragma once

#include "momentum_delta/detail/panel.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

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
      const PacketRow minus_b_k = -PacketRow(b + k * b_stride);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE { add(i, a[i * i_stride + k * k_stride], minus_b_k); });
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
      const PacketRow minus_row_j = -PacketRow(packet_[j]);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i > j) add(i, a[i * stride + j], minus_row_j);
      });
    });
  }
  EIGEN_ALWAYS_INLINE void solve_unit_lower_transposed(const Scalar* a, Index stride) {
    unroll<Rows>([&](auto reversed) MOMENTUM_DELTA_INLINE {
      constexpr int j = Rows - 1 - reversed;
      const PacketRow minus_row_j = -PacketRow(packet_[j]);
      unroll<Rows>([&](auto i) MOMENTUM_DELTA_INLINE {
        if constexpr (i < j) add(i, a[j * stride + i], minus_row_j);
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
    EIGEN_ALWAYS_INLINE PacketRow operator-() const {
      PacketRow minus = *this;
      each_part([&](auto panel, auto p) MOMENTUM_DELTA_INLINE {
        minus.packet[panel][p] = Eigen::internal::pnegate(packet[panel][p]);
      });
      return minus;
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

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
