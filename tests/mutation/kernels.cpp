// The kernels of a mutant: RULE and SCAN choose those of float, SCAN_DOUBLE and LAYER those of double.
#include "../support/kernels.hpp"

#ifdef RULE
TEST_RULE_KERNELS(template, float, float)
#endif
#ifdef SCAN
TEST_SCAN_KERNELS(template, float)
#endif
#ifdef SCAN_DOUBLE
TEST_SCAN_KERNELS(template, double)
#endif
#ifdef LAYER
TEST_LAYER_KERNELS(template, double)
#endif
