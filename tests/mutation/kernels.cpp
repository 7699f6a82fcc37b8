// The kernels of a mutant: RULE and SCAN choose those of float, SCAN_DOUBLE and LAYER those of double.
#include "../../examples/kernels/kernels.hpp"

#ifdef RULE
MOMENTUM_DELTA_RULE(template, float, float)
#endif
#ifdef SCAN
MOMENTUM_DELTA_SCAN(template, float, float)
#endif
#ifdef SCAN_DOUBLE
MOMENTUM_DELTA_SCAN(template, double, double)
#endif
#ifdef LAYER
MOMENTUM_DELTA_LAYER(template, double)
#endif
