#include "kernels.hpp"
FUZZ_KERNELS(template, Eigen::half)
