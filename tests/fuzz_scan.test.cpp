// The selective scan's fuzz target over strings of a fixed seed.
#include "fuzz/scan.hpp"
#include "fuzz/strings.hpp"

using namespace fuzz;

namespace {

// Each made the library fail when it was found.
constexpr Find scan_finds[] = {
    {"a row of a null delta", "2400006040002b49689292929292929292929208ffffffffffffff8b9292929292929292921e"},
};

}  // namespace

TEST_CASE("calls of the selective scan that strings choose are right or refused") {
  Reached reached;
  check_strings(4000, 80, [&](const String& string) { check_scan(string, &reached); });
  const auto all = [&](const std::string& what, const auto& names) {
    for (const char* name : names) reaches(reached, what + " " + name, what == "illegal:" ? 1 : 100);
  };
  all("kind", kind_names);
  all("type", type_names);
  all("algorithm", algorithm_names);
  for (const char* input : {"D", "z", "delta_bias", "initial_state"})
    all(input, std::array{"present", "absent"});
  all("delta_softplus", std::array{"true", "false"});
  all("final_state", final_names);
  all("dt", step_names);
  all("A", decay_names);
  all("chunk size", std::array{"automatic", "larger than T", "at most T"});
  all("executor", std::array{"0", "1", "2", "3"});
  all("workspace", std::array{"given", "own"});
  all("sizes", std::array{"with a zero", "positive"});
  all("gradients", std::array{"accumulated", "in place", "apart"});
  for (int i = 0; i < 2; ++i) all("upstream " + std::to_string(i), std::array{"given", "absent"});
  for (int i = 0; i < 9; ++i) all("gradient " + std::to_string(i), std::array{"wanted", "not"});
  all("illegal:", scan_illegal_names);
}

TEST_CASE("finds of the scan's target") {
  for (const Find& find : scan_finds) {
    INFO(find.name);
    CHECK(failure_of([&] { check_scan(from_hex(find.hex)); }) == "");
  }
}

TEST_CASE("the scan's checks notice a library that is wrong") {
  const auto noticed = [](Sabotage sabotage, const std::string& message) {
    INFO(message);
    CHECK(failing(message, [&](const String& string) { check_scan(string, nullptr, sabotage); }) >= 10);
  };
  noticed(Sabotage::value, "out[0] is ");
  noticed(Sabotage::result, "out has ");
  noticed(Sabotage::gradient, "ddelta has ");
  noticed(Sabotage::accepted, "an illegal call: accepted");
}
