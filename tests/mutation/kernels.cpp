// The kernels of a mutant, for float: RULE, SCAN, LAYER choose which.
#include "../support/kernels.hpp"

#ifdef RULE
TEST_RULE_KERNELS(template, float)
#endif
#ifdef SCAN
TEST_SCAN_KERNELS(template, float)
#endif
#ifdef LAYER
TEST_LAYER_KERNELS(template, float)
#endif
