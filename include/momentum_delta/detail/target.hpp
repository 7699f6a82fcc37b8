/// \file
/// A name for the instruction set that a translation unit is compiled for. What computes lies in an inline
/// namespace of this name: two translation units of one program may be compiled with different -march, and
/// neither runs the other's code, whichever the linker sees first. (Without it both would define the same
/// inline functions, and the linker keeps one.) What callers hold, views, options, workspaces, saved states
/// and executors, lies outside it and has the same layout everywhere, so these may pass from one to the
/// other. The layer's matrix products and temporaries are Eigen's, whose alignment and allocation depend on
/// -march: a program that mixes units which call the layer defines the same EIGEN_MAX_ALIGN_BYTES, 64, in all
/// of them.
#pragma once

#include "momentum_delta/detail/eigen.hpp"

/// The inline namespace of what computes: target_avx512, target_avx2_fma, target_avx, target_baseline or
/// target_scalar.
#if defined(EIGEN_VECTORIZE_AVX512)
#define MOMENTUM_DELTA_TARGET target_avx512
#elif defined(EIGEN_VECTORIZE_AVX2) && defined(EIGEN_VECTORIZE_FMA)
#define MOMENTUM_DELTA_TARGET target_avx2_fma
#elif defined(EIGEN_VECTORIZE_AVX)
#define MOMENTUM_DELTA_TARGET target_avx
#elif defined(EIGEN_VECTORIZE)
#define MOMENTUM_DELTA_TARGET target_baseline
#else
#define MOMENTUM_DELTA_TARGET target_scalar
#endif
