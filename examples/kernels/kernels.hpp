// The library's calls, compiled once for all files that include this: see momentum_delta/instantiate.hpp.
#pragma once

#include <momentum_delta/instantiate.hpp>

MOMENTUM_DELTA_RULE(extern template, float, float)
MOMENTUM_DELTA_SCAN(extern template, float, float)
MOMENTUM_DELTA_LAYER(extern template, float)

MOMENTUM_DELTA_RULE(extern template, double, double)
MOMENTUM_DELTA_SCAN(extern template, double, double)
MOMENTUM_DELTA_LAYER(extern template, double)

MOMENTUM_DELTA_RULE(extern template, float, Eigen::bfloat16)
MOMENTUM_DELTA_SCAN(extern template, float, Eigen::bfloat16)

MOMENTUM_DELTA_RULE(extern template, float, Eigen::half)
MOMENTUM_DELTA_SCAN(extern template, float, Eigen::half)
