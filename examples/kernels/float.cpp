#include "kernels.hpp"

MOMENTUM_DELTA_RULE(template, float, float)
MOMENTUM_DELTA_SCAN(template, float, float)
MOMENTUM_DELTA_LAYER(template, float)
