/// \file
/// Scalars, indices and the matrix aliases that every other header uses.
#pragma once

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error \
    "momentum_delta: a log gate of -inf is an exact value; build without -ffast-math and -ffinite-math-only"
#endif

#include <complex>
#include <cstdint>
#include <type_traits>

#include "momentum_delta/detail/target.hpp"

/// The momentum delta rule, the MomentumDeltaNet layer around it and Mamba's selective scan. Log gates are
/// natural logs. A call that gets what it cannot take throws std::invalid_argument
/// "momentum_delta::<function>: <argument> ...".
namespace momentum_delta {

/// Sizes, strides and offsets: 64 bits everywhere, in elements.
using Index = std::int64_t;
static_assert(sizeof(Eigen::Index) == sizeof(Index),
              "momentum_delta: Eigen's index type must have 64 bits (see EIGEN_DEFAULT_DENSE_INDEX_TYPE)");

namespace detail {

template <class Scalar>
using Real = typename Eigen::NumTraits<Scalar>::Real;

template <class Scalar>
inline constexpr bool is_compute_scalar = std::is_floating_point_v<Real<Scalar>>;

template <class Storage, class Scalar>
inline constexpr bool is_storage_of = std::is_same_v<Storage, Scalar> ||
                                      (std::is_same_v<Scalar, float> &&
                                       (std::is_same_v<Storage, Eigen::bfloat16> ||
                                        std::is_same_v<Storage, Eigen::half>));

template <class Scalar>
using Matrix = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class Scalar>
using RowVector = Eigen::Matrix<Scalar, 1, Eigen::Dynamic, Eigen::RowMajor>;

// Rows in the caller's memory: contiguous within a row, any distance from row to row.
template <class Scalar>
using RowsMap = Eigen::Map<
    std::conditional_t<std::is_const_v<Scalar>, const Matrix<std::remove_const_t<Scalar>>, Matrix<Scalar>>,
    Eigen::Unaligned, Eigen::OuterStride<>>;

// What kernels update in place: a matrix of its own, or the caller's rows.
template <class Scalar>
using MatrixRef = Eigen::Ref<Matrix<Scalar>, 0, Eigen::OuterStride<>>;

}  // namespace detail
}  // namespace momentum_delta
