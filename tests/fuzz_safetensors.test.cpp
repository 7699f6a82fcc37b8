// The readers' fuzz target over strings of a fixed seed.
#include "fuzz/safetensors.hpp"
#include "fuzz/strings.hpp"

using namespace fuzz;

TEST_CASE("files that strings choose are read or refused") {
  Reached reached;
  check_strings(4000, 200, [&](const String& string) { check_safetensors(string, &reached); });
  for (const char* base : base_names) reaches(reached, std::string("base ") + base, 100);
  for (const char* edit : edit_names) reaches(reached, std::string("edit ") + edit, 100);
  for (const char* reader : {"read", "read_case", "read_scan_case", "read_layer_case", "load_checkpoint"})
    for (const char* outcome : {" accepted", " refused"}) reaches(reached, std::string(reader) + outcome, 30);
}

TEST_CASE("the readers' checks notice a tensor without its bytes") {
  CHECK(failing("more's bytes are not its shape's",
                [](const String& string) { check_safetensors(string, nullptr, true); }) >= 30);
}
