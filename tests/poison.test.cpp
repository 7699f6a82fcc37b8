// What memory holds before a call changes no bit of its results: a workspace of exactly the needed size or a
// larger one, whatever is left in it, and outputs. Nor is anything beyond the needed size written.
#include <array>
#include <cstring>

#include "support/calls.hpp"
#include "support/catch.hpp"

using namespace test;
using Eigen::bfloat16;
using Eigen::half;
using momentum_delta::Workspace;

namespace {

using Needs = std::map<std::string, std::size_t>;  // of each call's workspace, in bytes

// Lends each call a new workspace, and notes how far it grew.
class Measured final : public Circumstances {
 public:
  explicit Measured(Needs& needs) : needs_(needs) {}
  void make(const std::string& name, const std::function<void(Workspace*)>& call) override {
    Workspace workspace;
    call(&workspace);
    needs_[name] = workspace.bytes();
  }

 private:
  Needs& needs_;
};

// Lends each call a workspace of what it needs and `more`, filled with a word.
class Poisoned final : public Circumstances {
 public:
  Poisoned(const Needs& needs, std::size_t more, std::uint32_t word, double before)
      : needs_(needs), more_(more), word_(word), before_(before) {}
  double before() const override { return before_; }
  void make(const std::string& name, const std::function<void(Workspace*)>& call) override {
    const std::size_t need = needs_.at(name), bytes = need + more_;
    Workspace workspace;
    std::byte* const memory = momentum_delta::detail::Scratch(workspace, 1, bytes).memory;
    for (std::size_t i = 0; i < bytes; i += sizeof word_) std::memcpy(memory + i, &word_, sizeof word_);
    call(&workspace);
    bool beyond = workspace.bytes() == bytes;
    for (std::size_t i = need; i < bytes; i += sizeof word_)
      beyond &= std::memcmp(memory + i, &word_, sizeof word_) == 0;
    if (!beyond) overrun = name;
  }

  std::string overrun;  // the last call that wrote past its need, or moved the workspace

 private:
  const Needs& needs_;
  std::size_t more_;
  std::uint32_t word_;
  double before_;
};

constexpr std::uint32_t words[] = {0xffffffff,   // a quiet NaN of every type
                                   0x7fa07fa0,   // a signalling one of float and bfloat16, a NaN of half
                                   0x7ff47ff4,   // a signalling one of double
                                   0x7f7f7f7f};  // the largest finite numbers

template <class Calls>
void check(const Calls& calls) {
  Needs needs;
  Measured measured(needs);
  const Given expected = calls(measured);
  for (const std::uint32_t word : words) {
    for (const std::size_t more : {0, 4096}) {
      for (const double before : {double(std::nanf("")), 42.}) {
        INFO(std::hex << word << std::dec << " in " << more << " bytes more, outputs of " << before);
        Poisoned poisoned(needs, more, word, before);
        CHECK(difference(calls(poisoned), expected) == "");
        CHECK(poisoned.overrun == "");
      }
    }
  }
}

template <class Scalar, class Storage>
void check_rule_and_scan() {
  for (const Shape& shape :
       {Shape{.T = 23, .K = 17, .V = 35}, Shape{.B = 2, .T = 5, .HK = 1, .HV = 2, .V = 1},
        Shape{.T = 67, .HK = 2, .HV = 4, .K = 3, .V = 16, .own_p = true}, Shape{.T = 1, .K = 1, .V = 33}}) {
    INFO("T " << shape.T << " K " << shape.K << " V " << shape.V);
    const Problem<double> x = random_problem(1, shape);
    const Upstream<double> dy = random_upstream(2, x);
    for (const Index C : {5, 16})
      check([&](Circumstances& c) { return rule_calls<Scalar, Storage>(x, dy, C, c); });
  }
  for (const ScanShape& shape :
       {ScanShape{.T = 23, .D = 17, .N = 5}, ScanShape{.B = 2, .T = 67, .D = 6, .G = 2, .N = 17},
        ScanShape{.T = 1, .D = 33, .N = 1}}) {
    INFO("T " << shape.T << " D " << shape.D << " N " << shape.N);
    const ScanProblem<double> x = random_scan(1, shape);
    const ScanUpstream<double> dy = random_upstream(2, x);
    for (const Index C : {5, 16})
      check([&](Circumstances& c) { return scan_calls<Scalar, Storage>(x, dy, C, c); });
  }
}

}  // namespace

TEST_CASE("whatever memory held before, of floats") {
  check_rule_and_scan<float, float>();
}
TEST_CASE("whatever memory held before, of doubles") {
  check_rule_and_scan<double, double>();
}
TEST_CASE("whatever memory held before, of bfloat16") {
  check_rule_and_scan<float, bfloat16>();
}
TEST_CASE("whatever memory held before, of half") {
  check_rule_and_scan<float, half>();
}
TEMPLATE_TEST_CASE("whatever memory held before, of what surrounds the rule, and of the layer", "", float,
                   double) {
  check([](Circumstances& c) {
    return parameter_calls<TestType>({.B = 2, .T = 3, .HK = 2, .HV = 4, .K = 17}, c);
  });
  check([](Circumstances& c) {
    return layer_calls<TestType>(
        {.hidden_size = 10, .num_heads = 2, .num_v_heads = 4, .head_dim = 5, .head_v_dim = 17}, 2, 19, c);
  });
}
