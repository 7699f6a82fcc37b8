#include "kernels.hpp"
FUZZ_KERNELS(template, Eigen::bfloat16)
