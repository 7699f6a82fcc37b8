#include "kernels.hpp"

MOMENTUM_DELTA_RULE(template, float, Eigen::bfloat16)
MOMENTUM_DELTA_SCAN(template, float, Eigen::bfloat16)
