// The calls of the rule in float with a 16-bit storage, compiled once: see ../support/kernels.hpp.
#pragma once

#include "../support/kernels.hpp"

TEST_RULE_KERNELS(extern template, float, Eigen::bfloat16)
TEST_RULE_KERNELS(extern template, float, Eigen::half)
