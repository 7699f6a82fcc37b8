// No call touches a byte beyond its tensors: each lies in memory of its own, with an inaccessible page
// directly at its end, and then directly before its beginning. The results are those of ordinary memory,
// bit for bit.
#include "support/guarded.hpp"

#include "support/catch.hpp"

using namespace test;
using Eigen::bfloat16;
using Eigen::half;

#if defined(TEST_GUARD_PAGES)

#include <csetjmp>
#include <csignal>

namespace {

constexpr Guarded::At sides[] = {Guarded::At::end, Guarded::At::beginning};

GuardedPages pages;

template <class Calls>
void check(const Calls& calls) {
  Circumstances ordinary;
  const Given expected = calls(ordinary);
  for (const Guarded::At at : sides) {
    INFO((at == Guarded::At::end ? "a page at the end" : "a page before the beginning"));
    Guarded guarded(pages, at);
    CHECK(difference(calls(guarded), expected) == "");
  }
}

// The heap, at the addresses that guarded tensors have within their pages.
class Ordinary final : public Circumstances {
 public:
  explicit Ordinary(Guarded::At at) : at_(at) {}
  std::byte* place(std::size_t element, std::span<const Index> shape, std::span<Index> stride) override {
    std::size_t bytes = element;
    for (const Index size : shape) bytes *= std::size_t(size);
    constexpr std::size_t line = 64;  // no register is wider
    const std::size_t skip = at_ == Guarded::At::beginning ? 0 : (line - bytes % line) % line;
    const Index all[] = {Index(bytes + skip)};
    return Circumstances::place(1, all, stride) + skip;
  }

 private:
  Guarded::At at_;
};

// Where an array starts within a vector register may change the last bit of sums: see layer.hpp.
template <class Calls>
void check_at_equal_addresses(const Calls& calls) {
  for (const Guarded::At at : sides) {
    INFO((at == Guarded::At::end ? "a page at the end" : "a page before the beginning"));
    Ordinary ordinary(at);
    Guarded guarded(pages, at);
    CHECK(difference(calls(guarded), calls(ordinary)) == "");
  }
}

constexpr Index C = 5;
constexpr Index lengths[] = {0, 1, C - 1, C, C + 1, 2 * C + 1};

// Every number of channels from none over a panel of floats to past two of them, each with another one.
constexpr Index most = 35;
Index partner(Index size) {
  return size * 13 % most + 1;
}

template <class Scalar, class Storage>
void check_rule(Shape shape, const std::vector<Index>& cu_seqlens = {}) {
  INFO("B " << shape.B << " T " << shape.T << " HK " << shape.HK << " HV " << shape.HV << " K " << shape.K
            << " V " << shape.V);
  Problem<double> x = random_problem(1, shape);
  x.cu_seqlens = cu_seqlens;
  x.initial_S = x.initial_M = examples::zeros<double>(x.state_shape());
  std::fill(x.initial_S.values.begin(), x.initial_S.values.end(), 0.5);
  std::fill(x.initial_M.values.begin(), x.initial_M.values.end(), 0.25);
  const Upstream<double> dy = random_upstream(2, x);
  check([&](Circumstances& c) { return rule_calls<Scalar, Storage>(x, dy, C, c); });
}

template <class Scalar, class Storage>
void check_scan(const ScanShape& shape) {
  INFO("B " << shape.B << " T " << shape.T << " D " << shape.D << " G " << shape.G << " N " << shape.N);
  const ScanProblem<double> x = random_scan(1, shape);
  const ScanUpstream<double> dy = random_upstream(2, x);
  check([&](Circumstances& c) { return scan_calls<Scalar, Storage>(x, dy, C, c); });
}

template <class Scalar, class Storage>
void check_shapes() {
  for (Index size = 1; size <= most; ++size) {
    const Index B = 1 + size % 2, HK = 1 + size / 2 % 2, group = 1 + size / 4 % 2;
    const Shape shape{
        .B = B, .HK = HK, .HV = HK * group, .K = size, .V = partner(size), .own_p = size % 3 == 0};
    for (const Index T : lengths) {
      Shape s = shape;
      s.T = T;
      check_rule<Scalar, Storage>(s);
      check_scan<Scalar, Storage>({.B = B, .T = T, .D = size, .N = partner(size) % 18 + 1});
      check_scan<Scalar, Storage>({.B = B, .T = T, .D = 2 * size, .G = 2, .N = partner(size)});
    }
  }
  // More than the tokens that the kernels take at a time.
  check_rule<Scalar, Storage>({.T = 65, .K = 3, .V = 17});
  check_rule<Scalar, Storage>({.T = 129, .K = 16, .V = 35});
  check_scan<Scalar, Storage>({.T = 65, .D = 17, .N = 5});
  check_scan<Scalar, Storage>({.T = 129, .D = 16, .N = 16});
  // Packed sequences.
  check_rule<Scalar, Storage>({.T = 2 * C + 1, .HK = 2, .HV = 4, .K = 7, .V = 19},
                              {0, 0, 1, C, C, 2 * C + 1});
  check_rule<Scalar, Storage>({.T = 0, .K = 7, .V = 19}, {0, 0});
}

}  // namespace

// The control: what the other tests rely on does end the program.
TEST_CASE("a byte beyond a guarded tensor cannot be read") {
  static sigjmp_buf before;
  struct Handled {
    struct sigaction segv {
    }, bus{};
    Handled() {
      struct sigaction handler {};
      handler.sa_handler = [](int) { siglongjmp(before, 1); };
      sigaction(SIGSEGV, &handler, &segv);
      sigaction(SIGBUS, &handler, &bus);
    }
    ~Handled() {
      sigaction(SIGSEGV, &segv, nullptr);
      sigaction(SIGBUS, &bus, nullptr);
    }
  };
  const auto readable = [](const volatile std::byte* at) {
    const Handled handled;
    if (sigsetjmp(before, 1) != 0) return false;
    static_cast<void>(*at);
    return true;
  };
  for (const Index size : {0, 1, 4096, 5000}) {
    std::array<Index, 1> shape{size}, stride{1};
    Guarded end(pages, Guarded::At::end), beginning(pages, Guarded::At::beginning);
    const std::byte* const a = end.place(1, shape, stride);
    const std::byte* const b = beginning.place(1, shape, stride);
    CHECK(!readable(a + size));
    CHECK(!readable(b - 1));
    if (size > 0) CHECK((readable(a) && readable(a + size - 1) && readable(b) && readable(b + size - 1)));
  }
}

TEST_CASE("guarded tensors of floats") {
  check_shapes<float, float>();
}
TEST_CASE("guarded tensors of doubles") {
  check_shapes<double, double>();
}
TEST_CASE("guarded tensors of bfloat16") {
  check_shapes<float, bfloat16>();
}
TEST_CASE("guarded tensors of half") {
  check_shapes<float, half>();
}

TEMPLATE_TEST_CASE("guarded tensors of what surrounds the rule, and of the layer", "", float, double) {
  for (Index size = 1; size <= most; ++size) {
    INFO("size " << size);
    const Index HK = 1 + size % 2, HV = HK * (1 + size / 2 % 3);
    for (const Index T : {0, 1, 3})
      check_at_equal_addresses([&](Circumstances& c) {
        return parameter_calls<TestType>({.B = 1 + size % 2, .T = T, .HK = HK, .HV = HV, .K = size}, c);
      });
    const momentum_delta::LayerConfig config{.hidden_size = partner(partner(size)),
                                             .num_heads = HK,
                                             .num_v_heads = HV,
                                             .head_dim = size,
                                             .head_v_dim = partner(size),
                                             .use_short_conv = size % 4 != 0,
                                             .conv_size = 1 + size % 5};
    for (const Index T : {0, 1, 6})
      check_at_equal_addresses(
          [&](Circumstances& c) { return layer_calls<TestType>(config, 1 + size % 2, T, c); });
  }
}

#else

TEST_CASE("guard pages") {
  WARN("not tested: this system's inaccessible pages are not known here");
}

#endif
