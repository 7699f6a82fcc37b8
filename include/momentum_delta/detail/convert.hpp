/// \file
/// Between float and its storage types, in the compiler's vectors: Eigen 3.4 converts bfloat16, and half
/// without AVX-512, one element at a time, which would cost the recurrence a fifth of its speed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "momentum_delta/types.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

#if defined(__GNUC__)

// As many elements as one register holds.
#if defined(__AVX512F__)
inline constexpr int vector_lanes = 16;
#elif defined(__AVX2__)
inline constexpr int vector_lanes = 8;
#else
inline constexpr int vector_lanes = 4;
#endif
using Floats = float __attribute__((vector_size(4 * vector_lanes)));
using Ints = std::int32_t __attribute__((vector_size(4 * vector_lanes)));
using Unsigned = std::uint32_t __attribute__((vector_size(4 * vector_lanes)));
using Shorts = std::uint16_t __attribute__((vector_size(2 * vector_lanes)));

// yes where the mask is set (-1), no where it is 0
EIGEN_ALWAYS_INLINE void select(const Ints& mask, const Ints& yes, Ints& no) {
  no = (mask & yes) | (~mask & no);
}

// bfloat16 is the upper half of a float.
EIGEN_ALWAYS_INLINE void convert_vector(const Eigen::bfloat16* from, float* to) {
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  const Ints wide = __builtin_convertvector(bits, Ints) << 16;
  std::memcpy(to, &wide, sizeof wide);
}
// Rounds to nearest even; NaN stays NaN.
EIGEN_ALWAYS_INLINE void convert_vector(const float* from, Eigen::bfloat16* to) {
  Ints bits;
  std::memcpy(&bits, from, sizeof bits);
  const Ints upper = (bits >> 16) & 0xffff;
  Ints rounded = ((bits & 0xffff) + 0x7fff + (upper & 1)) >> 16;
  rounded += upper;
  select((bits & 0x7fffffff) > 0x7f800000, (upper & 0x8000) | 0x7fc0, rounded);
  const Shorts narrow = __builtin_convertvector(rounded, Shorts);
  std::memcpy(static_cast<void*>(to), &narrow, sizeof narrow);
}

// half has 5 bits of exponent with bias 15 and 10 of mantissa, float 8 with bias 127 and 23.
EIGEN_ALWAYS_INLINE void convert_vector(const Eigen::half* from, float* to) {
  Shorts narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  const Ints bits = __builtin_convertvector(narrow, Ints);
  const Ints exponent = bits & 0x7c00, shifted = (bits & 0x7fff) << 13;
  Ints x = shifted + ((127 - 15) << 23);
  select(exponent == 0x7c00, shifted | 0x7f800000, x);  // infinity and NaN
  // A subnormal is mantissa * 2^-24: the difference of two floats with exponent -14, which is exact.
  const Floats difference = (Floats)(shifted + ((127 - 14) << 23)) - 0x1p-14f;
  select(exponent == 0, (Ints)difference, x);
  x |= (bits & 0x8000) << 16;
  std::memcpy(to, &x, sizeof x);
}
// Rounds to nearest even; NaN stays NaN.
EIGEN_ALWAYS_INLINE void convert_vector(const float* from, Eigen::half* to) {
  Ints bits;
  std::memcpy(&bits, from, sizeof bits);
  const Ints magnitude = bits & 0x7fffffff;
  const Ints below_normal = magnitude < ((127 - 14) << 23);
  // Unsigned, for where x is no normal half this wraps around, and is not used.
  const Unsigned bias = (Unsigned)magnitude - ((127u - 15) << 23), odd = ((Unsigned)magnitude >> 13) & 1;
  Ints x = (Ints)((bias + odd + 0xfff) >> 13);
  // 0.5 added, a number below 2^-14 has its multiple of 2^-24 in the lowest bits, rounded.
  const Floats small = (Floats)(magnitude & below_normal) + 0.5f;
  select(below_normal, (Ints)small - 0x3f000000, x);
  select(magnitude >= ((127 + 16) << 23), Ints{} + 0x7c00, x);  // too large
  select(magnitude > 0x7f800000, Ints{} + 0x7e00, x);           // NaN
  x |= (bits >> 16) & 0x8000;
  const Shorts half = __builtin_convertvector(x, Shorts);
  std::memcpy(static_cast<void*>(to), &half, sizeof half);
}

#else

inline constexpr int vector_lanes = 1;

template <class From, class To>
void convert_vector(const From* from, To* to) {
  *to = To(*from);
}

#endif

// n contiguous elements; what is stored is rounded once, to nearest even.
template <class From, class To>
EIGEN_ALWAYS_INLINE void convert(const From* from, To* to, Index n) {
  if constexpr (std::is_same_v<From, To>) {
    std::copy_n(from, n, to);
  } else {
    Index i = 0;
    for (; i + vector_lanes <= n; i += vector_lanes) convert_vector(from + i, to + i);
    if (i == n) return;
    From padded[vector_lanes] = {};
    To converted[vector_lanes];
    std::copy_n(from + i, n - i, padded);
    convert_vector(padded, converted);
    std::copy_n(converted, n - i, to + i);
  }
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
