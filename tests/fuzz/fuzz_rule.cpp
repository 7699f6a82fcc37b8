// A violated check escapes, and ends the program.
#include "rule.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::check_rule({data, size});
  return 0;
}
