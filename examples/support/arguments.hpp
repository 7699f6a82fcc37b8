// The arguments of a program: options "--name VALUE" and flags, one after the other.
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>

namespace examples {

struct UsageError : std::runtime_error {
  using runtime_error::runtime_error;
};

class ArgumentReader {
 public:
  ArgumentReader(int argc, char** argv) : argc_(argc), argv_(argv) {}

  std::string option;

  // Is there another one? It is then `option`.
  bool next() {
    if (++at_ >= argc_) return false;
    option = argv_[at_];
    return true;
  }

  // The next argument. Throws UsageError if there is none.
  std::string value() {
    if (++at_ >= argc_) throw UsageError(option + " needs a value");
    return argv_[at_];
  }

  // The next argument as a number. Throws UsageError unless it is one in [lowest, 1e9).
  template <class Number>
  Number number(int lowest) {
    const std::string text = value();
    const char* const end = text.data() + text.size();
    Number x{};
    const auto [rest, error] = std::from_chars(text.data(), end, x);
    if (error != std::errc() || rest != end || !(x >= Number(lowest)) || !(double(x) < 1e9))
      throw UsageError(option + " takes a number >= " + std::to_string(lowest) + ", not \"" + text + "\"");
    return x;
  }

 private:
  int argc_, at_ = 0;
  char** argv_;
};

}  // namespace examples
