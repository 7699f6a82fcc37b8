#include "kernels.hpp"

MOMENTUM_DELTA_RULE(template, double, double)
MOMENTUM_DELTA_SCAN(template, double, double)
MOMENTUM_DELTA_LAYER(template, double)
