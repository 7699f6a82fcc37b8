#include "kernels.hpp"
TEST_KERNELS(template, double)
