// A violated check escapes, and ends the program.
#include "scan.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::check_scan({data, size});
  return 0;
}
