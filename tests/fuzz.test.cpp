// The rule's fuzz target over strings of a fixed seed, and over those that once found something.
#include "fuzz/rule.hpp"
#include "fuzz/strings.hpp"

using namespace fuzz;

namespace {

// Each made the library fail when it was found. Choices in another order make another call of it.
constexpr Find rule_finds[] = {
    {"the difference of offsets that are no offsets overflows", "7f80ff1a"},
    {"a row of a null view of no elements",
     "0a48484848489c4848484848370000001b4848000a000a0000000060ffffffffffffff48ff"},
    {"a panel of a saved state without columns", "0a00160009001d91000a98"},
};

}  // namespace

TEST_CASE("calls of the rule that strings choose are right or refused") {
  Reached reached;
  check_strings(6000, 80, [&](const String& string) { check_rule(string, &reached); });

  // Every choice is met by a legal call, and every way to be illegal by a call.
  const auto all = [&](const std::string& what, const auto& names) {
    for (const char* name : names) reaches(reached, what + " " + name, what == "illegal:" ? 1 : 100);
  };
  all("kind", kind_names);
  all("type", type_names);
  all("algorithm", algorithm_names);
  all("backward algorithm", algorithm_names);
  all("p", p_names);
  all("log_alpha", level_names);
  all("log_mu", level_names);
  all("beta", rate_names);
  all("eta", rate_names);
  all("final_S", final_names);
  all("final_M", final_names);
  all("illegal:", illegal_names);
  for (const char* state : {"initial_S", "initial_M"}) all(state, std::array{"present", "absent"});
  all("scale", std::array{"given", "absent"});
  all("sequences", std::array{"batches", "packed"});
  all("chunk size", std::array{"automatic", "larger than T", "at most T"});
  all("executor", std::array{"0", "1", "2", "3"});
  all("workspace", std::array{"given", "own"});
  all("sizes", std::array{"with a zero", "positive"});
  for (const char* name : {"q", "log_mu"}) all(name, std::array{"repeated", "with gaps", "without gaps"});
  all("o", std::array{"with gaps", "without gaps"});
  all("interval", std::array{"1", "2", "3", "1000"});
  all("u", std::array{"kept", "not kept"});
  all("gradients", std::array{"accumulated", "in place", "apart"});
  for (int i = 0; i < 3; ++i) all("upstream " + std::to_string(i), std::array{"given", "absent"});
  for (int i = 0; i < 10; ++i) all("gradient " + std::to_string(i), std::array{"wanted", "not"});
}

TEST_CASE("finds of the rule's target") {
  for (const Find& find : rule_finds) {
    INFO(find.name);
    CHECK(failure_of([&] { check_rule(from_hex(find.hex)); }) == "");
  }
}

// Each wrong library makes the checks of most strings that it touches fail.
TEST_CASE("the rule's checks notice a library that is wrong") {
  const auto noticed = [](Sabotage sabotage, const std::string& message) {
    INFO(message);
    CHECK(failing(message, [&](const String& string) { check_rule(string, nullptr, sabotage); }) >= 10);
  };
  noticed(Sabotage::value, "o[0] is ");
  noticed(Sabotage::gap, "between the elements of o is changed");
  noticed(Sabotage::input, "in q is changed");
  noticed(Sabotage::result, "final_S has ");
  noticed(Sabotage::gradient, "dv has ");
  noticed(Sabotage::accepted, "an illegal call: accepted");
  noticed(Sabotage::message, "an illegal call: momentum_delta: ");
  noticed(Sabotage::written, "a refused call wrote to o");
}
