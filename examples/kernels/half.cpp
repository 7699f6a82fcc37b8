#include "kernels.hpp"

MOMENTUM_DELTA_RULE(template, float, Eigen::half)
MOMENTUM_DELTA_SCAN(template, float, Eigen::half)
