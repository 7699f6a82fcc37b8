// Two translation units that include everything: no warning, and nothing defined twice.
#include <momentum_delta/momentum_delta.hpp>

float other(Eigen::Index T);

int main() {
  return other(3) == 0.0f ? 0 : 1;
}
