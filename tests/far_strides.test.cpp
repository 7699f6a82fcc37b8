// Offsets past 2^31 and 2^32 elements: each tensor is spread over more memory than there is, of which only
// the touched pages exist. The results are those of contiguous tensors, bit for bit.
#include "support/calls.hpp"
#include "support/catch.hpp"
#include "support/sanitizer.hpp"

#if defined(__unix__) || defined(__APPLE__)
#define TEST_SPARSE_MEMORY
#include <sys/mman.h>
#endif

using namespace test;
using Eigen::bfloat16;
using Eigen::half;

#if defined(TEST_SPARSE_MEMORY)

namespace {

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr Index far = Index(1) << 32, near = Index(1) << 14;  // both farther than in a contiguous tensor

// Tensors whose last index of one dimension is more than `reach` elements from its first.
class Apart final : public Circumstances {
 public:
  // axis: that dimension, or the last but one if there are no more. multiple: of each stride.
  Apart(std::size_t axis, Index reach, Index multiple) : axis_(axis), reach_(reach), multiple_(multiple) {}
  ~Apart() override {
    for (const auto& [memory, bytes] : mapped_) munmap(memory, bytes);
  }

  std::byte* place(std::size_t element, std::span<const Index> shape, std::span<Index> stride) override {
    if (shape.size() < 2) return Circumstances::place(element, shape, stride);
    const std::size_t axis = std::min(axis_, shape.size() - 2);
    if (shape[axis] < 2) return Circumstances::place(element, shape, stride);
    const Index least = reach_ / (shape[axis] - 1) + 1;
    stride[axis] = (least + multiple_ - 1) / multiple_ * multiple_;
    for (std::size_t d = axis; d-- > 0;) stride[d] = stride[d + 1] * shape[d + 1];
    const std::size_t bytes = std::size_t(stride[0] * shape[0]) * element;
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw Refused(std::to_string(bytes) + " bytes of address space were refused");
    mapped_.emplace_back(memory, bytes);
    ++count;
    return static_cast<std::byte*>(memory);
  }

  int count = 0;  // tensors so placed

 private:
  std::size_t axis_;
  Index reach_, multiple_;
  std::vector<std::pair<void*, std::size_t>> mapped_;
};

// reference(axis): what to compare with.
template <class Calls, class Reference>
void check(const Calls& calls, const std::vector<std::size_t>& axes, Index multiple,
           const Reference& reference) {
  for (const std::size_t axis : axes) {
    INFO("dimension " << axis);
    Apart apart(axis, far, multiple);
    try {
      CHECK(difference(calls(apart), reference(axis)) == "");
      CHECK(apart.count > 0);
    } catch (const Refused& refused) {
      WARN("not tested: " << refused.what());
#if !defined(TEST_SANITIZER)
      FAIL("offsets past 32 bits are not tested");
#endif
    }
  }
}
template <class Calls>
void check(const Calls& calls, const std::vector<std::size_t>& axes, Index multiple = 1) {
  Circumstances contiguous;
  const Given expected = calls(contiguous);
  check(calls, axes, multiple, [&](std::size_t) { return expected; });
}

constexpr Index C = 2;

template <class Scalar, class Storage>
void check_rule(const std::vector<std::size_t>& axes = {0, 1, 2}) {
  // Two batches and heads, so that one step of a stride is past 2^32; and several, so that 2^31 is passed
  // too.
  for (const Shape& shape : {Shape{.B = 2, .T = 5, .HK = 2, .HV = 2, .K = 5, .V = 3},
                             Shape{.B = 3, .T = 2, .HK = 3, .HV = 6, .K = 17, .V = 16, .own_p = true}}) {
    const Problem<double> x = random_problem(1, shape);
    const Upstream<double> dy = random_upstream(2, x);
    check([&](Circumstances& c) { return rule_calls<Scalar, Storage>(x, dy, C, c); }, axes);
  }
}
template <class Scalar, class Storage>
void check_scan(const std::vector<std::size_t>& axes = {0, 1, 2}) {
  for (const ScanShape& shape : {ScanShape{.B = 2, .T = 5, .D = 6, .G = 2, .N = 5},
                                 ScanShape{.B = 3, .T = 2, .D = 51, .G = 3, .N = 3}}) {
    const ScanProblem<double> x = random_scan(1, shape);
    const ScanUpstream<double> dy = random_upstream(2, x);
    check([&](Circumstances& c) { return scan_calls<Scalar, Storage>(x, dy, C, c); }, axes);
  }
}

}  // namespace

TEST_CASE("strides past 32 bits, floats") {
  check_rule<float, float>();
  check_scan<float, float>();
}
TEST_CASE("strides past 32 bits, doubles") {
  check_rule<double, double>();
  check_scan<double, double>();
}
// Storage is of tokens.
const std::vector<std::size_t> tokens = {1};
TEST_CASE("strides past 32 bits, bfloat16") {
  check_rule<float, bfloat16>(tokens);
  check_scan<float, bfloat16>(tokens);
}
TEST_CASE("strides past 32 bits, half") {
  check_rule<float, half>(tokens);
  check_scan<float, half>(tokens);
}
// Whole cache lines, as where an array starts within a vector register may change the last bit of sums.
TEMPLATE_TEST_CASE("strides past 32 bits of what surrounds the rule, and of the layer", "", float, double) {
  constexpr Index line = 16;
  check(
      [](Circumstances& c) {
        return parameter_calls<TestType>({.B = 2, .T = 3, .HK = 2, .HV = 4, .K = line}, c);
      },
      {0, 1, 2}, line);
  // Batches that do not follow each other are products of their own, so the layer's reference has them apart.
  const auto layer = [](Circumstances& c) {
    return layer_calls<TestType>(
        {.hidden_size = line, .num_heads = 2, .num_v_heads = 4, .head_dim = 5, .head_v_dim = 7}, 2, 5, c);
  };
  check(layer, {0, 1}, line, [&](std::size_t axis) {
    Apart apart(axis, near, line);
    return layer(apart);
  });
}

#else

TEST_CASE("strides past 32 bits") {
  WARN("not tested: how to reserve addresses without memory is not known here");
}

#endif
