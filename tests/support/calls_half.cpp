#include "calls_of.hpp"
TEST_STORED_CALLS(float, Eigen::half)
