// Strings for a fuzz target without a fuzzer.
#pragma once

#include <string>
#include <vector>

#include "../../examples/support/random.hpp"
#include "../support/catch.hpp"
#include "bytes.hpp"

namespace fuzz {

using String = std::vector<std::uint8_t>;

inline String random_string(std::uint64_t seed, std::size_t size) {
  examples::Random random(seed);
  String bytes(size);
  for (std::uint8_t& byte : bytes) byte = std::uint8_t(random.bits());
  return bytes;
}

inline String from_hex(const std::string& hex) {
  String bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(std::uint8_t(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

// What is wrong by a target, or "".
template <class Check>
std::string failure_of(const Check& check) {
  try {
    check();
  } catch (const Failure& e) {
    return e.what();
  }
  return "";
}

inline void reaches(const Reached& reached, const std::string& name, int least = 1) {
  INFO(name);
  const auto found = reached.find(name);
  CHECK((found == reached.end() ? 0 : found->second) >= least);
}

struct Find {
  const char* name;
  const char* hex;
};

// Runs a target over so many strings.
template <class Check>
void check_strings(int count, std::size_t size, const Check& check) {
  int failures = 0;
  for (int seed = 1; seed <= count; ++seed) {
    const std::string failure = failure_of([&] { check(random_string(std::uint64_t(seed), size)); });
    if (failure.empty()) continue;
    UNSCOPED_INFO("string " << seed << ": " << failure);
    ++failures;
  }
  CHECK(failures == 0);
}

// How many of the first 300 strings make the check fail with this message.
template <class Check>
int failing(const std::string& message, const Check& check) {
  int count = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed)
    count += failure_of([&] { check(random_string(seed, 200)); }).find(message) != std::string::npos;
  return count;
}

}  // namespace fuzz
