// Every bad input: the right exception, naming the function, the argument and what is wrong, with nothing
// written.
#include <functional>

#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;
using momentum_delta::Inputs;
using momentum_delta::Outputs;

namespace {

// A valid call that each test spoils in one way.
struct Call {
  Problem<float> x = random_problem(1, {.B = 2, .T = 6, .HK = 2, .HV = 4, .K = 3, .V = 5}).as<float>();
  Results<float> y{examples::zeros<float>(x.v.shape), examples::zeros<float>(x.state_shape()),
                   examples::zeros<float>(x.state_shape())};
  Inputs<float> in = x.inputs();
  Outputs<float> out = y.outputs();
  Options options;

  Call() {
    for (auto* a : {&y.o, &y.final_S, &y.final_M}) std::fill(a->values.begin(), a->values.end(), 42.f);
  }
  bool untouched() const {
    for (const auto* a : {&y.o, &y.final_S, &y.final_M})
      if (std::count(a->values.begin(), a->values.end(), 42.f) != Index(a->values.size())) return false;
    return true;
  }
};

void refused(const std::string& expected, const std::function<void(Call&)>& spoil) {
  for (const Algorithm algorithm : {Algorithm::recurrent, Algorithm::chunk}) {
    Call call;
    call.options.algorithm = algorithm;
    spoil(call);
    const std::vector<float> q = call.x.q.values;
    std::string message = "accepted";
    try {
      momentum_delta::forward(call.in, call.out, call.options);
    } catch (const std::invalid_argument& e) {
      message = e.what();
    }
    INFO(message);
    CHECK(message == "momentum_delta::forward: " + expected);
    CHECK(call.x.q.values == q);
    if (message != "accepted") CHECK(call.untouched());
  }
}

}  // namespace

TEST_CASE("the call that the tests spoil is valid") {
  Call call;
  momentum_delta::forward(call.in, call.out, call.options);
  CHECK(!call.untouched());
}

TEST_CASE("shapes") {
  refused("q is missing; its shape is [B, T, HK, K]", [](Call& c) { c.in.q = {}; });
  refused("v is missing; its shape is [B, T, HV, V]", [](Call& c) { c.in.v = {}; });
  refused("k is missing; its shape is [B, T, HK, K] of q = [2, 6, 2, 3]", [](Call& c) { c.in.k = {}; });
  refused("o is missing; its shape is [B, T, HV, V] of v = [2, 6, 4, 5]", [](Call& c) { c.out.o = {}; });
  refused("k has shape [2, 6, 2, 4], not [B, T, HK, K] of q = [2, 6, 2, 3]",
          [](Call& c) { c.in.k.shape[3] = 4; });
  refused("k has shape [2, 6, 1, 3], not [B, T, HK, K] of q = [2, 6, 2, 3]",
          [](Call& c) { c.in.k.shape[2] = 1; });
  refused("v has shape [2, 5, 4, 5], not [B, T, HV, V] with B, T of q = [2, 6, 4, 5]",
          [](Call& c) { c.in.v.shape[1] = 5; });
  refused("v has 3 heads, which is no positive multiple of the 2 heads of q and k",
          [](Call& c) { c.in.v.shape[2] = 3; });
  refused("v has 1 heads, which is no positive multiple of the 2 heads of q and k",
          [](Call& c) { c.in.v.shape[2] = 1; });
  refused("p has shape [2, 6, 3, 3], not [B, T, HK or HV, K] of q and v = [2, 6, 4, 3]",
          [](Call& c) { c.in.p.shape[2] = 3; });
  refused("p has shape [2, 6, 2, 2], not [B, T, HK, K] of q = [2, 6, 2, 3]",
          [](Call& c) { c.in.p.shape[3] = 2; });
  refused("o has shape [2, 6, 4, 6], not [B, T, HV, V] of v = [2, 6, 4, 5]",
          [](Call& c) { c.out.o.shape[3] = 6; });
  for (auto gate :
       {&Inputs<float>::log_alpha, &Inputs<float>::log_mu, &Inputs<float>::beta, &Inputs<float>::eta}) {
    const Call names;
    const std::string name = gate == &Inputs<float>::log_alpha ? "log_alpha"
                             : gate == &Inputs<float>::log_mu  ? "log_mu"
                             : gate == &Inputs<float>::beta    ? "beta"
                                                               : "eta";
    refused(name + " has shape [2, 6, 2], not [B, T, HV] = [2, 6, 4]",
            [=](Call& c) { (c.in.*gate).shape[2] = 2; });
  }
  refused("initial_S has shape [1, 4, 3, 5], not [N, HV, K, V] = [2, 4, 3, 5]",
          [](Call& c) { c.in.initial_S.shape[0] = 1; });
  refused("initial_M has shape [2, 4, 5, 3], not [N, HV, K, V] = [2, 4, 3, 5]",
          [](Call& c) { std::swap(c.in.initial_M.shape[2], c.in.initial_M.shape[3]); });
  refused("final_S has shape [2, 2, 3, 5], not [N, HV, K, V] = [2, 4, 3, 5]",
          [](Call& c) { c.out.final_S.shape[1] = 2; });
  refused("final_M has shape [2, 2, 3, 5], not [N, HV, K, V] = [2, 4, 3, 5]",
          [](Call& c) { c.out.final_M.shape[1] = 2; });
}

TEST_CASE("memory") {
  refused("q has shape [2, -6, 2, 3]: sizes must be >= 0", [](Call& c) { c.in.q.shape[1] = -6; });
  refused("v has strides [120, 20, 5, 2]: the last one must be 1", [](Call& c) { c.in.v.stride[3] = 2; });
  refused("beta has strides [24, -4, 1]: strides must be >= 0", [](Call& c) { c.in.beta.stride[1] = -4; });
  refused("k has shape [2, 6, 2, 3] but its data is null", [](Call& c) { c.in.k.data = nullptr; });
  refused(
      "o has shape [2, 6, 4, 5] and strides [120, 0, 5, 1]: in an output each stride must step over all that "
      "smaller strides reach",
      [](Call& c) { c.out.o.stride[1] = 0; });
  refused(
      "final_S has shape [2, 4, 3, 5] and strides [60, 15, 4, 1]: in an output each stride must step over "
      "all that smaller strides reach",
      [](Call& c) { c.out.final_S.stride[2] = 4; });
}

TEST_CASE("sizes whose products 64 bits cannot count") {
  using momentum_delta::TokenView;
  constexpr Index large = Index(1) << 40;
  refused(
      "q has shape [2, 1099511627776, 1048576, 3] and strides [3458764513820540928, 3145728, 3, 1]: more "
      "bytes "
      "than can be addressed",
      [](Call& c) {
        c.in.q = TokenView<const float>(c.in.q.data, {2, large, Index(1) << 20, 3});
      });
  refused(
      "q has shape [2, 1099511627776, 1099511627776, 3] and strides [9223372036854775807, 3298534883328, 3, "
      "1]: more bytes than can be addressed",
      [](Call& c) {
        c.in.q = TokenView<const float>(c.in.q.data, {2, large, large, 3});
      });
  refused(
      "beta has shape [2, 6, 4] and strides [24, 4611686018427387904, 1]: more bytes than can be addressed",
      [](Call& c) { c.in.beta.stride[1] = Index(1) << 62; });
  refused(
      "o has shape [2, 6, 4, 5] and strides [120, 20, 2305843009213693951, 1]: more bytes than can be "
      "addressed",
      [](Call& c) { c.out.o.stride[2] = (Index(1) << 61) - 1; });

  // No token, so no memory; but the kernels' states would have K V elements.
  refused("states of [N, HV, K, V] = [1, 1, 4294967296, 4294967296] are more elements than can be addressed",
          [](Call& c) {
            const std::array<Index, 4> shape{1, 0, 1, Index(1) << 32};
            const TokenView<const float> none(c.in.q.data, shape);
            c.in = {.q = none, .k = none, .v = none};
            c.out = {.o = {c.out.o.data, shape}};
          });
  refused("tokens of [B, T] = [1099511627776, 1099511627776] are more elements than can be addressed",
          [](Call& c) {
            const std::array<Index, 4> shape{large, large, 0, 3};
            const TokenView<const float> none(c.in.q.data, shape, {0, 0, 0, 1});
            c.in = {.q = none, .k = none, .v = none};
            c.out = {.o = {c.out.o.data, shape, {0, 0, 0, 1}}};
          });
  // The same token again and again is little memory; a chunk of them all is not.
  Call call;
  const TokenView<const float> one(call.in.q.data, {1, large, 1, 1}, {0, 0, 0, 1});
  try {
    momentum_delta::forward(Inputs<float>{.q = one, .k = one, .v = one},
                            {.o = {call.out.o.data, {1, large, 1, 1}}},
                            {.algorithm = Algorithm::chunk, .chunk_size = large});
    FAIL("accepted");
  } catch (const std::invalid_argument& e) {
    CHECK(
        std::string(e.what()) ==
        "momentum_delta::forward: a chunk of [tokens, tokens or K or V] = [1099511627776, 1099511627776] are "
        "more elements than can be addressed");
  }
}

TEST_CASE("gates") {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const auto at = [](Array<float> Problem<float>::*gate, float value) {
    return [=](Call& c) { (c.x.*gate).values[(1 * 6 + 2) * 4 + 3] = value; };
  };
  refused("log_alpha[1, 2, 3] = nan is not a number", at(&Problem<float>::log_alpha, nan));
  refused("log_mu[1, 2, 3] = nan is not a number", at(&Problem<float>::log_mu, nan));
  refused("beta[1, 2, 3] = nan is not a number", at(&Problem<float>::beta, nan));
  refused("eta[1, 2, 3] = nan is not a number", at(&Problem<float>::eta, nan));
  refused("log_alpha[1, 2, 3] = inf is infinite", at(&Problem<float>::log_alpha, inf));
  refused("log_mu[1, 2, 3] = inf is infinite", at(&Problem<float>::log_mu, inf));
  refused("beta[1, 2, 3] = inf is infinite", at(&Problem<float>::beta, inf));
  refused("beta[1, 2, 3] = -inf is infinite", at(&Problem<float>::beta, -inf));
  refused("eta[1, 2, 3] = -inf is infinite", at(&Problem<float>::eta, -inf));
  const std::string positive =
      "[1, 2, 3] = 0.5 is positive; a log gate is <= 0 unless options.allow_positive_log_gates is set";
  refused("log_alpha" + positive, at(&Problem<float>::log_alpha, 0.5f));
  refused("log_mu" + positive, at(&Problem<float>::log_mu, 0.5f));

  Call call;
  call.x.log_mu.values[3] = 0.5f;
  call.x.log_alpha.values[4] = -inf;
  call.options.allow_positive_log_gates = true;
  CHECK_NOTHROW(momentum_delta::forward(call.in, call.out, call.options));
  call.x.log_mu.values[3] = inf;
  CHECK_THROWS_AS(momentum_delta::forward(call.in, call.out, call.options), std::invalid_argument);
  call.x.log_mu.values[3] = nan;
  CHECK_THROWS_AS(momentum_delta::forward(call.in, call.out, call.options), std::invalid_argument);
}

TEST_CASE("scale and options") {
  refused("scale = nan is not finite", [](Call& c) { c.in.scale = std::nanf(""); });
  refused("options.chunk_size = 0 is less than 1", [](Call& c) { c.options.chunk_size = 0; });
  refused("options.chunk_size = -4 is less than 1", [](Call& c) { c.options.chunk_size = -4; });
  Call call;
  const auto message = [&](auto forward) -> std::string {
    try {
      forward();
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "accepted";
  };
  CHECK(message([&] { momentum_delta::forward<8>(call.in, call.out, {.chunk_size = 9}); }) ==
        "momentum_delta::forward: options.chunk_size = 9 is not ChunkSize = 8");
  CHECK(
      message([&] { momentum_delta::forward<8>(call.in, call.out, {.algorithm = Algorithm::recurrent}); }) ==
      "momentum_delta::forward: options.algorithm is recurrent, which has no chunk size, but ChunkSize = 8");
  CHECK(call.untouched());
}

TEST_CASE("offsets of packed sequences") {
  static std::vector<Index> offsets;
  const auto with = [](std::vector<Index> values, Index B = 1) {
    return [=](Call& c) {
      offsets = values;
      c.in.cu_seqlens = offsets;
      for (auto* view : {&c.in.q, &c.in.k, &c.in.v, &c.in.p}) view->shape[0] = B;
      for (auto* view : {&c.in.log_alpha, &c.in.log_mu, &c.in.beta, &c.in.eta}) view->shape[0] = B;
      c.out.o.shape[0] = B;
    };
  };
  refused("cu_seqlens needs B = 1, but q has B = 2", with({0, 6}, 2));
  refused("cu_seqlens[0] = 1 is not 0", with({1, 6}));
  refused("cu_seqlens[2] = 2 is less than cu_seqlens[1] = 3", with({0, 3, 2, 6}));
  refused("cu_seqlens[1] = 7 is more than T = 6", with({0, 7}));
  constexpr Index least = std::numeric_limits<Index>::min(), most = std::numeric_limits<Index>::max();
  refused("cu_seqlens[0] = " + std::to_string(least) + " is not 0", with({least, most, 6}));
  refused("cu_seqlens[1] = " + std::to_string(most) + " is more than T = 6", with({0, most, least, 6}));
  refused("cu_seqlens[1] = 5 is less than T = 6: the last tokens belong to no sequence", with({0, 5}));
  refused("initial_S has shape [2, 4, 3, 5], not [N, HV, K, V] = [3, 4, 3, 5]", with({0, 2, 4, 6}));
  Call call;
  with({0, 2, 6})(call);
  CHECK_NOTHROW(momentum_delta::forward(call.in, call.out, call.options));
}

TEST_CASE("aliasing") {
  using momentum_delta::StateView;
  using momentum_delta::TokenView;
  const auto writable = [](const momentum_delta::StridedView<const float, 4>& view) {
    return const_cast<float*>(view.data);
  };
  refused("o shares memory with v", [=](Call& c) { c.out.o.data = writable(c.in.v); });
  refused("final_S shares memory with o", [=](Call& c) { c.out.final_S.data = c.out.o.data + 7; });
  refused("final_M shares memory with final_S",
          [=](Call& c) { c.out.final_M.data = c.out.final_S.data + 119; });
  refused("final_S shares memory with initial_M",
          [=](Call& c) { c.out.final_S.data = writable(c.in.initial_M); });
  refused("final_M shares memory with initial_S",
          [=](Call& c) { c.out.final_M.data = writable(c.in.initial_S); });
  refused("final_S shares memory with initial_S",
          [=](Call& c) { c.out.final_S.data = writable(c.in.initial_S) + 1; });
  refused("o shares memory with beta", [=](Call& c) { c.in.beta.data = c.out.o.data; });
  refused("final_M shares memory with q", [=](Call& c) { c.in.q.data = c.out.final_M.data; });

  // v and o side by side in one buffer, [B, T, H, 2, V], share no element.
  Call call;
  std::vector<float> both(2 * call.x.v.values.size(), 1.f);
  const std::array<Index, 4> stride{6 * 4 * 10, 4 * 10, 10, 1};
  call.in.v = TokenView<const float>(both.data(), call.in.v.shape, stride);
  call.out.o = TokenView<float>(both.data() + 5, call.out.o.shape, stride);
  CHECK_NOTHROW(momentum_delta::forward(call.in, call.out, call.options));
  call.out.o.data = both.data() + 4;
  CHECK_THROWS_AS(momentum_delta::forward(call.in, call.out, call.options), std::invalid_argument);
}

TEST_CASE("step") {
  Call call;
  const auto message = [&](const std::function<void(Call&)>& spoil) -> std::string {
    Call c;
    for (auto* view : {&c.in.q, &c.in.k, &c.in.v, &c.in.p}) view->shape[1] = 1;
    for (auto* view : {&c.in.log_alpha, &c.in.log_mu, &c.in.beta, &c.in.eta}) view->shape[1] = 1;
    c.out.o.shape[1] = 1;
    c.in.initial_S = c.in.initial_M = {};
    spoil(c);
    try {
      momentum_delta::step(c.in, c.out.final_S, c.out.final_M, c.out.o, c.options);
    } catch (const std::invalid_argument& e) {
      CHECK(c.untouched());
      return e.what();
    }
    return "accepted";
  };
  CHECK(message([](Call&) {}) == "accepted");
  CHECK(message([](Call& c) { c.in = c.x.inputs(); }) == "momentum_delta::step: q has T = 6 tokens, not 1");
  CHECK(message([](Call& c) { c.in.initial_S = c.x.inputs().initial_S; }) ==
        "momentum_delta::step: initial_S must be absent: the state is S");
  CHECK(message([](Call& c) { c.in.initial_M = c.x.inputs().initial_M; }) ==
        "momentum_delta::step: initial_M must be absent: the state is M");
  CHECK(message([](Call& c) { c.out.final_S = {}; }) ==
        "momentum_delta::step: S is missing; its shape is [B, HV, K, V] = [2, 4, 3, 5]");
  CHECK(message([](Call& c) { c.out.final_M.shape[3] = 4; }) ==
        "momentum_delta::step: M has shape [2, 4, 3, 4], not [B, HV, K, V] = [2, 4, 3, 5]");
  CHECK(message([](Call& c) { c.out.final_M.data = c.out.final_S.data; }) ==
        "momentum_delta::step: M shares memory with S");
  CHECK(message([](Call& c) { c.options.chunk_size = 4; }) ==
        "momentum_delta::step: options.chunk_size is set, but one token is no chunk");
  CHECK(message([](Call& c) { c.options.algorithm = Algorithm::chunk; }) ==
        "momentum_delta::step: options.algorithm is chunk, but one token is no chunk");
}
