/// \file
/// Views of the caller's memory. A view owns nothing and copies nothing; it must not outlive what it views.
/// Strides count elements. No Eigen type is stored, so a view means the same under every compiler flag.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "momentum_delta/types.hpp"

namespace momentum_delta {

namespace detail {

// What a view of const Scalar may be made from, beside its own kind.
template <class Mutable, class Scalar>
concept MutableOf = std::is_same_v<const Mutable, Scalar> && !std::is_const_v<Mutable>;

// A pointer, or a container of elements in a row.
template <class T>
constexpr bool without_shape = std::is_pointer_v<T>;
template <class T>
constexpr bool without_shape<std::vector<T>> = true;

}  // namespace detail

/// A strided array of `Rank` dimensions, strides >= 0. A default-constructed view, no memory and only sizes
/// of 0, stands for an absent argument.
template <class Scalar, std::size_t Rank>
struct StridedView {
  Scalar* data = nullptr;            ///< element [0, 0, ..]; may be null where there are no elements
  std::array<Index, Rank> shape{};   ///< sizes >= 0
  std::array<Index, Rank> stride{};  ///< elements from one index to the next, >= 0; 0 repeats what is read

  /// An absent argument.
  constexpr StridedView() = default;
  /// Any strides >= 0, in elements. Sizes and strides are checked by the calls that take the view; those of
  /// an output must give each element memory of its own.
  constexpr StridedView(Scalar* memory, std::array<Index, Rank> sizes, std::array<Index, Rank> strides)
      : data(memory), shape(sizes), stride(strides) {}
  /// Contiguous, last dimension fastest. A stride that would overflow is the largest there is, which every
  /// call refuses.
  constexpr StridedView(Scalar* memory, std::array<Index, Rank> sizes) : data(memory), shape(sizes) {
    constexpr Index most = std::numeric_limits<Index>::max();
    Index step = 1;
    for (std::size_t d = Rank; d-- > 0;) {
      stride[d] = step;
      if (shape[d] <= 0)
        step = 0;
      else
        step = step > most / shape[d] ? most : step * shape[d];
    }
  }

  /// Is a size 0?
  constexpr bool empty() const {
    for (const Index size : shape)
      if (size == 0) return true;
    return false;
  }
  /// Memory alone is not enough: does not compile, and says so.
  template <class Memory, std::enable_if_t<detail::without_shape<Memory>, int> = 0>
  constexpr StridedView(const Memory&) {
    static_assert(sizeof(Memory) == 0, "momentum_delta: a view needs sizes too, as in {x.data(), {B, T, H}}");
  }

  /// Does it stand for an absent argument, null and of size 0 throughout?
  constexpr bool absent() const { return data == nullptr && shape == std::array<Index, Rank>{}; }

 protected:  // each kind of view is made from its own kind only
  /// A view of const Scalar of what a view of Scalar sees.
  template <detail::MutableOf<Scalar> Mutable>
  constexpr StridedView(const StridedView<Mutable, Rank>& other)
      : data(other.data), shape(other.shape), stride(other.stride) {}
};

namespace detail {

template <class T>
concept EigenDense = requires(const std::remove_cvref_t<T>& x) {
  []<class Derived>(const Eigen::DenseBase<Derived>&) {}(x);
};

// Does an rvalue of this type take its memory with it? A Ref<const ..> may hold a copy.
template <class T>
struct owns_memory : std::is_base_of<Eigen::PlainObjectBase<T>, T> {};
template <class T, int Options, class Stride>
struct owns_memory<Eigen::Ref<const T, Options, Stride>> : std::true_type {};

template <class Scalar>
struct EigenMemory {
  Scalar* data = nullptr;
  Index rows = 0, cols = 0, row_stride = 0, col_stride = 0;
};

// Where an Eigen object lies, or a refusal in words at compile time.
template <class Scalar, class Argument>
EigenMemory<Scalar> memory_of(Argument&& m) {
  using Derived = std::remove_cvref_t<Argument>;
  constexpr bool in_memory = (int(Derived::Flags) & int(Eigen::DirectAccessBit)) != 0;
  constexpr bool same_scalar = std::is_same_v<typename Derived::Scalar, std::remove_const_t<Scalar>>;
  static_assert(in_memory,
                "momentum_delta: pass a matrix, a map or a block; an expression has no memory to view");
  static_assert(
      same_scalar,
      "momentum_delta: the matrix must hold the Scalar of Inputs and Outputs, and for tokens the Storage");
  static_assert(bool(Derived::IsRowMajor) || bool(Derived::IsVectorAtCompileTime),
                "momentum_delta: the matrix must be row-major (Eigen::RowMajor); a column-major one would "
                "have to be copied");
  static_assert(std::is_lvalue_reference_v<Argument> || !owns_memory<Derived>::value,
                "momentum_delta: a temporary matrix is gone before its view is read; give it a name");
  if constexpr (in_memory && same_scalar) {
    constexpr bool writable = std::is_convertible_v<decltype(m.data()), Scalar*>;
    static_assert(writable, "momentum_delta: an output must not be const");
    if constexpr (writable) return {m.data(), m.rows(), m.cols(), m.rowStride(), m.colStride()};
  }
  return {};
}

}  // namespace detail

/// Vectors of tokens, [B, T, H, D]: q, k, p (D = K), v and o (D = V). The D elements of a vector are
/// contiguous. A T x D row-major Eigen matrix, map or block is one head of one sequence: [1, T, 1, D].
template <class Scalar>
struct TokenView : StridedView<Scalar, 4> {
  using StridedView<Scalar, 4>::StridedView;
  /// An absent argument.
  constexpr TokenView() = default;
  /// A view of const Scalar of what a view of Scalar sees.
  template <detail::MutableOf<Scalar> Mutable>
  constexpr TokenView(const TokenView<Mutable>& other) : StridedView<Scalar, 4>(other) {}
  /// T x D, row-major: one head of one sequence, [1, T, 1, D]. A matrix, map, block or Ref of the view's
  /// scalar; what would have to be copied, or is gone before it is read, does not compile.
  template <detail::EigenDense Argument>
  TokenView(Argument&& m) : TokenView(detail::memory_of<Scalar>(std::forward<Argument>(m))) {}

  /// Tokens [t, t + count) of one head: count x D. Indices are not checked. Without elements every row is
  /// where the data is, null too.
  detail::RowsMap<Scalar> rows(Index b, Index h, Index t, Index count) const {
    const auto& s = this->stride;
    const bool none = this->empty();
    const Index offset = none ? 0 : b * s[0] + t * s[1] + h * s[2];
    return {this->data + offset, count, this->shape[3], Eigen::OuterStride<>(none ? 0 : s[1])};
  }

 private:
  explicit TokenView(const detail::EigenMemory<Scalar>& m)
      : StridedView<Scalar, 4>(m.data, {1, m.rows, 1, m.cols},
                               {m.rows * m.row_stride, m.row_stride, m.cols, m.col_stride}) {}
};

/// One number a token and value head, [B, T, H]: log_alpha, log_mu, beta, eta. Any strides >= 0.
/// An Eigen vector of length T is one head of one sequence; a T x H row-major matrix is H heads of one.
template <class Scalar>
struct GateView : StridedView<Scalar, 3> {
  using StridedView<Scalar, 3>::StridedView;
  /// An absent argument.
  constexpr GateView() = default;
  /// A view of const Scalar of what a view of Scalar sees.
  template <detail::MutableOf<Scalar> Mutable>
  constexpr GateView(const GateView<Mutable>& other) : StridedView<Scalar, 3>(other) {}
  /// A vector of T, as [1, T, 1], or row-major T x H, as [1, T, H]. A matrix, map, block or Ref of the view's
  /// scalar; what would have to be copied, or is gone before it is read, does not compile.
  template <detail::EigenDense Argument>
  GateView(Argument&& m)
      : GateView(detail::memory_of<Scalar>(std::forward<Argument>(m)),
                 bool(std::remove_cvref_t<Argument>::IsVectorAtCompileTime)) {}

  /// The gate of one token. Indices are not checked.
  Scalar& at(Index b, Index t, Index h) const {
    const auto& s = this->stride;
    return this->data[b * s[0] + t * s[1] + h * s[2]];
  }

 private:
  GateView(const detail::EigenMemory<Scalar>& m, bool vector)
      : StridedView<Scalar, 3>(m.data, {1, m.rows, m.cols},
                               {m.rows * m.row_stride, m.row_stride, m.col_stride}) {
    if (vector && m.rows == 1) *this = GateView({m.data, m.cols, 1, m.col_stride, 1}, false);
  }
};

/// S or M of every sequence and value head, [N, H, K, V]; N is B, or the number of packed sequences.
/// The V elements of a row are contiguous. A K x V row-major Eigen matrix, map or block is [1, 1, K, V].
template <class Scalar>
struct StateView : StridedView<Scalar, 4> {
  using StridedView<Scalar, 4>::StridedView;
  /// An absent argument.
  constexpr StateView() = default;
  /// A view of const Scalar of what a view of Scalar sees.
  template <detail::MutableOf<Scalar> Mutable>
  constexpr StateView(const StateView<Mutable>& other) : StridedView<Scalar, 4>(other) {}
  /// K x V, row-major: one head of one sequence, [1, 1, K, V]. A matrix, map, block or Ref of the view's
  /// scalar; what would have to be copied, or is gone before it is read, does not compile.
  template <detail::EigenDense Argument>
  StateView(Argument&& m) : StateView(detail::memory_of<Scalar>(std::forward<Argument>(m))) {}

  /// One head's state: K x V. Indices are not checked.
  detail::RowsMap<Scalar> matrix(Index n, Index h) const {
    const auto& s = this->stride;
    const bool none = this->empty();
    const Index offset = none ? 0 : n * s[0] + h * s[1];
    return {this->data + offset, this->shape[2], this->shape[3], Eigen::OuterStride<>(none ? 0 : s[2])};
  }

 private:
  explicit StateView(const detail::EigenMemory<Scalar>& m)
      : StridedView<Scalar, 4>(m.data, {1, 1, m.rows, m.cols},
                               {m.rows * m.row_stride, m.rows * m.row_stride, m.row_stride, m.col_stride}) {}
};

/// An array whose last dimension is contiguous: [B, T, D], [B, D, N], [D, N] or [D] of the selective scan. An
/// Eigen row-major matrix is the last two dimensions, each before them 1; an Eigen vector is [D].
template <class Scalar, std::size_t Rank>
struct ArrayView : StridedView<Scalar, Rank> {
  using StridedView<Scalar, Rank>::StridedView;
  /// An absent argument.
  constexpr ArrayView() = default;
  /// A view of const Scalar of what a view of Scalar sees.
  template <detail::MutableOf<Scalar> Mutable>
  constexpr ArrayView(const ArrayView<Mutable, Rank>& other) : StridedView<Scalar, Rank>(other) {}
  /// A row-major matrix as the last two dimensions; of rank 1, a vector. A matrix, map, block or Ref of the
  /// view's scalar; what would have to be copied, or is gone before it is read, does not compile.
  template <detail::EigenDense Argument>
  ArrayView(Argument&& m) : ArrayView(detail::memory_of<Scalar>(std::forward<Argument>(m))) {
    static_assert(Rank > 1 || bool(std::remove_cvref_t<Argument>::IsVectorAtCompileTime),
                  "momentum_delta: one number a channel is an Eigen vector");
  }

  /// Where the last dimension starts, at the other Rank - 1 indices, which are not checked. Where the data is
  /// null, null.
  template <class... Indices>
  Scalar* row(Indices... i) const {
    static_assert(sizeof...(i) == Rank - 1);
    Scalar* at = this->data;
    if (at == nullptr) return at;
    std::size_t d = 0;
    ((at += Index(i) * this->stride[d++]), ...);
    return at;
  }

 private:
  explicit ArrayView(const detail::EigenMemory<Scalar>& m) : StridedView<Scalar, Rank>() {
    this->data = m.data;
    this->shape.fill(1);
    this->stride.fill(m.rows * m.row_stride);
    const bool one_row = m.rows == 1;
    this->shape[Rank - 1] = Rank == 1 && !one_row ? m.rows : m.cols;
    this->stride[Rank - 1] = Rank == 1 && !one_row ? m.row_stride : m.col_stride;
    if constexpr (Rank > 1) {
      this->shape[Rank - 2] = m.rows;
      this->stride[Rank - 2] = m.row_stride;
    }
  }
};

/// Offsets of packed sequences in memory of the caller's: a std::span that does not see temporaries.
class Offsets : public std::span<const Index> {
 public:
  /// An absent argument.
  constexpr Offsets() = default;
  /// Of a vector, array or span of Index.
  template <class Range>
  requires std::convertible_to<Range&&, std::span<const Index>>
  constexpr Offsets(Range&& range) : std::span<const Index>(std::forward<Range>(range)) {
    static_assert(
        std::is_lvalue_reference_v<Range> || std::ranges::enable_borrowed_range<std::remove_cvref_t<Range>>,
        "momentum_delta: temporary offsets are gone before they are read; name them first");
  }
};

}  // namespace momentum_delta
