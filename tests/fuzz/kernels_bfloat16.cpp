#include "kernels.hpp"
TEST_RULE_KERNELS(template, float, Eigen::bfloat16)
