#include "calls_of.hpp"
TEST_CALLS(double)
