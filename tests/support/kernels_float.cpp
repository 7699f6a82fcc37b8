#include "kernels.hpp"
TEST_KERNELS(template, float)
