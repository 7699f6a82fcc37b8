/// \file
/// Eigen, without its own warnings: a program that adds Eigen's folder with -I rather than -isystem would see
/// them.
#pragma once

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#if !defined(__clang__)  // g++ 12's own AVX-512 header, which Eigen includes
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#endif

#include <Eigen/Core>
#if defined(__GNUC__) && defined(__AVX512F__)  // which Eigen includes too, but with EIGEN_DONT_VECTORIZE
#include <immintrin.h>
#endif

#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
