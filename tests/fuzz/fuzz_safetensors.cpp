// A violated check escapes, and ends the program.
#include "safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::check_safetensors({data, size});
  return 0;
}
