#include <momentum_delta/detail/overlap.hpp>

#include <set>

#include "../support/catch.hpp"
#include "../support/problem.hpp"

using namespace test;
using momentum_delta::StridedView;
using momentum_delta::detail::distinct_elements;
using momentum_delta::detail::Footprint;
using momentum_delta::detail::overlap;

// Every small view against the set of elements it touches.
TEST_CASE("overlap is exact for any strides") {
  static float memory[400];
  Random random(1);
  const auto any_view = [&] {
    StridedView<float, 4> view;
    view.data = memory + random.bits() % 60;
    for (std::size_t d = 0; d < 4; ++d) {
      view.shape[d] = Index(random.bits() % 4);
      view.stride[d] = Index(random.bits() % 25);
    }
    if (random.bits() % 2) view.stride[3] = 1;
    return view;
  };
  const auto elements = [](const StridedView<float, 4>& x) {
    std::multiset<float*> all;
    for (Index a = 0; a < x.shape[0]; ++a)
      for (Index b = 0; b < x.shape[1]; ++b)
        for (Index c = 0; c < x.shape[2]; ++c)
          for (Index d = 0; d < x.shape[3]; ++d)
            all.insert(x.data + a * x.stride[0] + b * x.stride[1] + c * x.stride[2] + d * x.stride[3]);
    return all;
  };
  int overlapping = 0, apart = 0, distinct = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto x = any_view(), y = any_view();
    const auto in_x = elements(x), in_y = elements(y);
    const bool common = std::any_of(in_x.begin(), in_x.end(), [&](float* p) { return in_y.contains(p); });
    REQUIRE(overlap(Footprint(x), Footprint(y)) == common);
    ++(common ? overlapping : apart);
    if (distinct_elements(x)) {  // sufficient
      REQUIRE(std::set<float*>(in_x.begin(), in_x.end()).size() == in_x.size());
      ++distinct;
    }
  }
  CHECK(overlapping > 1000);
  CHECK(apart > 1000);
  CHECK(distinct > 1000);
}

TEST_CASE("dense and transposed layouts have distinct elements") {
  static float memory[120];
  CHECK(distinct_elements(StridedView<float, 4>(memory, {2, 3, 4, 5})));
  CHECK(distinct_elements(StridedView<float, 4>(memory, {2, 4, 3, 5}, {60, 5, 20, 1})));
  CHECK(distinct_elements(StridedView<float, 4>(memory, {1, 3, 1, 5}, {0, 5, 0, 1})));
  CHECK(!distinct_elements(StridedView<float, 4>(memory, {2, 3, 4, 5}, {60, 20, 5, 0})));
}
