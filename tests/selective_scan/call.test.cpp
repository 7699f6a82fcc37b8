// The selective scan's calls: bad input, storage types, threads and memory.
#include <functional>

#include "../support/catch.hpp"
#include "../support/heap.hpp"
#include "../support/scan.hpp"

using namespace test;
using Eigen::bfloat16;
using Eigen::half;
using momentum_delta::ArrayView;
using momentum_delta::ScanInputGradients;
using momentum_delta::ScanInputs;
using momentum_delta::ScanOutputGradients;
using momentum_delta::ScanOutputs;
using momentum_delta::ScanSaved;
using momentum_delta::ThreadPool;
using momentum_delta::TokenView;
using momentum_delta::Workspace;

namespace {

// Valid calls that each test spoils in one way.
struct Call {
  ScanProblem<float> x = random_scan(1, {.B = 2, .T = 6, .D = 4, .G = 2, .N = 3}).as<float>();
  ScanUpstream<float> upstream = random_upstream(1, x.as<double>()).as<float>();
  ScanResults<float> y{examples::zeros<float>(x.u.shape), examples::zeros<float>(x.state_shape())};
  ScanGradients<float> gradients = examples::unwritten_gradients(x);
  ScanInputs<float> in = x.inputs();
  ScanOutputs<float> out = y.outputs();
  ScanOutputGradients<float> dy = upstream.views();
  ScanInputGradients<float> dx = gradients.views();
  ScanSaved<float> saved;
  ScanOptions options;

  Call() {
    momentum_delta::scan_forward(in, out, saved, options);
    for (auto* a : {&y.out, &y.final_state}) std::fill(a->values.begin(), a->values.end(), 42.f);
    ScanGradients<float>::for_each([&](const char*, auto get, auto) {
      std::fill(get(gradients).values.begin(), get(gradients).values.end(), 42.f);
    });
  }
  bool untouched() const {
    bool same = true;
    const auto check = [&](const Array<float>& a) {
      same &= std::count(a.values.begin(), a.values.end(), 42.f) == Index(a.values.size());
    };
    check(y.out);
    check(y.final_state);
    ScanGradients<float>::for_each([&](const char*, auto get, auto) { check(get(gradients)); });
    return same;
  }
};

void refused(const char* function, const std::string& expected, const std::function<void(Call&)>& spoil,
             const std::function<void(Call&)>& run) {
  Call call;
  spoil(call);
  std::string message = "accepted";
  try {
    run(call);
  } catch (const std::invalid_argument& e) {
    message = e.what();
  }
  CHECK(message == "momentum_delta::" + std::string(function) + ": " + expected);
  CHECK(call.untouched());
}
void refused(const std::string& expected, const std::function<void(Call&)>& spoil) {
  refused("scan_forward", expected, spoil,
          [](Call& c) { momentum_delta::scan_forward(c.in, c.out, c.options); });
  refused(
      "scan_forward", expected, [&](Call& c) { spoil(c), c.options.algorithm = Algorithm::chunk; },
      [](Call& c) { momentum_delta::scan_forward(c.in, c.out, c.saved, c.options); });
}
void refused_backward(const std::string& expected, const std::function<void(Call&)>& spoil) {
  refused("scan_backward", expected, spoil,
          [](Call& c) { momentum_delta::scan_backward(c.in, c.saved, c.dy, c.dx, c.options); });
}
void refused_step(const std::string& expected, const std::function<void(Call&)>& spoil) {
  refused("scan_step", expected, spoil,
          [](Call& c) { momentum_delta::scan_step(c.in, c.out.final_state, c.out.out, c.options); });
}

void one_token(Call& c) {
  for (auto* view : {&c.in.u, &c.in.delta, &c.in.z}) *view = token_of(*view, 0);
  for (auto* view : {&c.in.B, &c.in.C}) *view = token_of(*view, 0);
  c.out.out = token_of(c.out.out, 0);
  c.in.initial_state = {};
}

}  // namespace

TEST_CASE("the calls that the tests spoil are valid") {
  Call call;
  momentum_delta::scan_forward(call.in, call.out, call.options);
  CHECK(!call.untouched());
  Call back;
  momentum_delta::scan_backward(back.in, back.saved, back.dy, back.dx, back.options);
  CHECK(!back.untouched());
  Call step;
  one_token(step);
  momentum_delta::scan_step(step.in, step.out.final_state, step.out.out);
  CHECK(!step.untouched());
}

TEST_CASE("shapes and memory") {
  refused("u is missing; its shape is [B, T, D]", [](Call& c) { c.in.u = {}; });
  refused("A is missing; its shape is [D, N]", [](Call& c) { c.in.A = {}; });
  refused("B is missing; its shape is [B, T, G, N]", [](Call& c) { c.in.B = {}; });
  refused("delta is missing; its shape is [B, T, D] of u = [2, 6, 4]", [](Call& c) { c.in.delta = {}; });
  refused("C is missing; its shape is [B, T, G, N] of u, B and A = [2, 6, 2, 3]",
          [](Call& c) { c.in.C = {}; });
  refused("out is missing; its shape is [B, T, D] of u = [2, 6, 4]", [](Call& c) { c.out.out = {}; });
  refused("delta has shape [2, 5, 4], not [B, T, D] of u = [2, 6, 4]",
          [](Call& c) { c.in.delta.shape[1] = 5; });
  refused("A has shape [3, 3], not [D, N] with D of u = [4, 3]", [](Call& c) { c.in.A.shape[0] = 3; });
  refused("B has shape [2, 6, 2, 2], not [B, T, G, N] of u and A = [2, 6, 2, 3]",
          [](Call& c) { c.in.B.shape[3] = 2; });
  refused("C has shape [2, 6, 1, 3], not [B, T, G, N] of u, B and A = [2, 6, 2, 3]",
          [](Call& c) { c.in.C.shape[2] = 1; });
  refused("B has 3 groups, which do not divide the 4 channels of u evenly",
          [](Call& c) { c.in.B.shape[2] = c.in.C.shape[2] = 3; });
  refused("B has 0 groups, which do not divide the 4 channels of u evenly",
          [](Call& c) { c.in.B.shape[2] = c.in.C.shape[2] = 0; });
  refused("D has shape [3], not [D] of u = [4]", [](Call& c) { c.in.D.shape[0] = 3; });
  refused("z has shape [1, 6, 4], not [B, T, D] of u = [2, 6, 4]", [](Call& c) { c.in.z.shape[0] = 1; });
  refused("delta_bias has shape [5], not [D] of u = [4]", [](Call& c) { c.in.delta_bias.shape[0] = 5; });
  refused("initial_state has shape [2, 4, 2], not [B, D, N] of u and A = [2, 4, 3]",
          [](Call& c) { c.in.initial_state.shape[2] = 2; });
  refused("final_state has shape [1, 4, 3], not [B, D, N] of u and A = [2, 4, 3]",
          [](Call& c) { c.out.final_state.shape[0] = 1; });
  refused("u has shape [2, -6, 4]: sizes must be >= 0", [](Call& c) { c.in.u.shape[1] = -6; });
  refused("z has 2 as its last stride, not 1: neighbours must be contiguous",
          [](Call& c) { c.in.z.stride[2] = 2; });
  refused("A has 2 as its last stride, not 1: neighbours must be contiguous",
          [](Call& c) { c.in.A.stride[1] = 2; });
  refused("delta has strides [24, -4, 1]: strides must be >= 0", [](Call& c) { c.in.delta.stride[1] = -4; });
  refused("u has shape [2, 6, 4] but its data is null", [](Call& c) { c.in.u.data = nullptr; });
  refused(
      "out has shape [2, 6, 4] and strides [24, 0, 1]: in an output each stride must step over all that "
      "smaller strides reach",
      [](Call& c) { c.out.out.stride[1] = 0; });
  refused("out shares memory with u", [](Call& c) { c.out.out.data = const_cast<float*>(c.in.u.data); });
  refused("out shares memory with z", [](Call& c) { c.out.out.data = const_cast<float*>(c.in.z.data) + 1; });
  refused("final_state shares memory with out", [](Call& c) { c.out.final_state.data = c.out.out.data; });
  refused("final_state shares memory with initial_state",
          [](Call& c) { c.out.final_state.data = const_cast<float*>(c.in.initial_state.data) + 1; });
  refused("options.chunk_size = 0 is less than 1", [](Call& c) { c.options.chunk_size = 0; });
}

TEST_CASE("sizes whose products 64 bits cannot count") {
  constexpr Index large = Index(1) << 32;
  refused("A has shape [4, 3] and strides [3074457345618258602, 1]: more bytes than can be addressed",
          [](Call& c) { c.in.A.stride[0] = std::numeric_limits<Index>::max() / 3; });
  refused("states of [B, D, N] = [1, 4294967296, 4294967296] are more elements than can be addressed",
          [](Call& c) {
            const ArrayView<const float, 3> none(c.in.u.data, {1, 0, large});
            const TokenView<const float> no_groups(c.in.B.data, {1, 0, 1, large});
            c.in = {.u = none,
                    .delta = none,
                    .A = {c.in.A.data, {large, large}, {0, 1}},
                    .B = no_groups,
                    .C = no_groups};
            c.out = {.out = {c.out.out.data, {1, 0, large}}};
          });
}

TEST_CASE("values") {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const auto A = [](float value) { return [=](Call& c) { c.x.A.values[7] = value; }; };
  refused("A[2, 1] = 1e-30 is positive; a decay exp(dt A) needs A in [-inf, 0]", A(1e-30f));
  refused("A[2, 1] = inf is positive; a decay exp(dt A) needs A in [-inf, 0]", A(inf));
  refused("A[2, 1] = nan is not a number", A(nan));
  const auto delta = [](float value) { return [=](Call& c) { c.x.delta.values[(6 + 2) * 4 + 3] = value; }; };
  refused("delta[1, 2, 3] = inf is not finite", delta(inf));
  refused("delta[1, 2, 3] = -inf is not finite", delta(-inf));
  refused("delta[1, 2, 3] = nan is not finite", delta(nan));
  refused("delta_bias[1] = nan is not finite", [=](Call& c) { c.x.delta_bias.values[1] = nan; });
  refused("delta[1, 2, 3] + delta_bias[3] = inf is not finite",
          [](Call& c) { c.x.delta.values[(6 + 2) * 4 + 3] = c.x.delta_bias.values[3] = 3e38f; });
  refused("delta[1, 2, 3] + delta_bias[3] = -0.5 is negative; without delta_softplus it is dt, which is >= 0",
          [](Call& c) {
            c.in.delta_softplus = false;
            std::fill(c.x.delta.values.begin(), c.x.delta.values.end(), 9.f);
            c.x.delta_bias.values[3] = 1;
            c.x.delta.values[(6 + 2) * 4 + 3] = -1.5f;
          });
}

TEST_CASE("backward") {
  refused_backward("A[0, 0] = 1 is positive; a decay exp(dt A) needs A in [-inf, 0]",
                   [](Call& c) { c.x.A.values[0] = 1; });
  refused_backward("saved holds no forward pass", [](Call& c) { c.saved = {}; });
  refused_backward("saved is of a forward pass with T = 6, but x has 5", [](Call& c) {
    for (auto* view : {&c.in.u, &c.in.delta, &c.in.z}) view->shape[1] = 5;
    for (auto* view : {&c.in.B, &c.in.C}) view->shape[1] = 5;
    c.dy.dout.shape[1] = 5;
    for (auto* view : {&c.dx.du, &c.dx.ddelta, &c.dx.dz}) view->shape[1] = 5;
    for (auto* view : {&c.dx.dB, &c.dx.dC}) view->shape[1] = 5;
  });
  refused_backward("options.chunk_size = 4, but saved was made with 6",
                   [](Call& c) { c.options.chunk_size = 4; });
  refused_backward("dout has shape [2, 6, 3], not [B, T, D] of u = [2, 6, 4]",
                   [](Call& c) { c.dy.dout.shape[2] = 3; });
  refused_backward("dfinal_state has shape [2, 4, 2], not [B, D, N] of u and A = [2, 4, 3]",
                   [](Call& c) { c.dy.dfinal_state.shape[2] = 2; });
  refused_backward("du has shape [1, 6, 4], not [B, T, D] of u = [2, 6, 4]",
                   [](Call& c) { c.dx.du.shape[0] = 1; });
  refused_backward("dA has shape [4, 2], not [D, N] of A = [4, 3]", [](Call& c) { c.dx.dA.shape[1] = 2; });
  refused_backward("dB has shape [2, 6, 1, 3], not [B, T, G, N] of B = [2, 6, 2, 3]",
                   [](Call& c) { c.dx.dB.shape[2] = 1; });
  refused_backward("dC has shape [2, 6, 2, 1], not [B, T, G, N] of C = [2, 6, 2, 3]",
                   [](Call& c) { c.dx.dC.shape[3] = 1; });
  refused_backward("dD must be absent: D is absent", [](Call& c) { c.in.D = {}; });
  refused_backward("dz must be absent: z is absent", [](Call& c) { c.in.z = {}; });
  refused_backward("ddelta_bias must be absent: delta_bias is absent", [](Call& c) { c.in.delta_bias = {}; });
  refused_backward("dinitial_state has shape [2, 3, 3], not [B, D, N] of u and A = [2, 4, 3]",
                   [](Call& c) { c.dx.dinitial_state.shape[1] = 3; });
  refused_backward("ddelta shares memory with delta",
                   [](Call& c) { c.dx.ddelta.data = const_cast<float*>(c.in.delta.data); });
  refused_backward("dz shares memory with du", [](Call& c) { c.dx.dz.data = c.dx.du.data; });
  refused_backward("dinitial_state shares memory with dfinal_state", [](Call& c) {
    c.dx.dinitial_state.data = const_cast<float*>(c.dy.dfinal_state.data);
    c.dx.accumulate = true;
  });
}

TEST_CASE("step") {
  refused_step("u is missing; its shape is [B, 1, D]", [](Call& c) { c.in.u = {}; });
  refused_step("u has T = 6 tokens, not 1", [](Call&) {});
  refused_step("initial_state must be absent: the state is an argument", [](Call& c) {
    one_token(c);
    c.in.initial_state = c.x.inputs().initial_state;
  });
  refused_step("options.algorithm is chunk, but one token is no chunk",
               [](Call& c) { one_token(c), c.options.algorithm = Algorithm::chunk; });
  refused_step("options.chunk_size is set, but one token is no chunk",
               [](Call& c) { one_token(c), c.options.chunk_size = 4; });
  refused_step("state is missing; its shape is [B, D, N] of u and A = [2, 4, 3]",
               [](Call& c) { one_token(c), c.out.final_state = {}; });
  refused_step("out has shape [2, 2, 4], not [B, T, D] of u = [2, 1, 4]",
               [](Call& c) { one_token(c), c.out.out.shape[1] = 2; });
  refused_step("A[3, 2] = 1 is positive; a decay exp(dt A) needs A in [-inf, 0]",
               [](Call& c) { one_token(c), c.x.A.values[11] = 1; });
}

// What float computes from stored inputs, rounded once.
TEMPLATE_TEST_CASE("storage types", "", bfloat16, half) {
  using Storage = TestType;
  ScanProblem<float> x = random_scan(2, {.B = 2, .T = 37, .D = 838, .G = 2, .N = 5}).as<float>();
  ScanUpstream<float> dy = random_upstream(2, x.as<double>()).as<float>();
  const auto store = [](Array<float>& from) {
    const Array<Storage> stored = cast<Storage>(from);
    from = cast<float>(stored);
    return stored;
  };
  const Array<Storage> u = store(x.u), delta = store(x.delta), B = store(x.B), C = store(x.C), z = store(x.z),
                       dout = store(dy.dout);
  const auto tokens = [](const auto& a) { return a.template view<ArrayView<const Storage, 3>>(); };
  const auto groups = [](const auto& a) { return a.template view<TokenView<const Storage>>(); };
  const ScanInputs<float> in = x.inputs();
  const ScanInputs<float, Storage> stored{.u = tokens(u),
                                          .delta = tokens(delta),
                                          .A = in.A,
                                          .B = groups(B),
                                          .C = groups(C),
                                          .D = in.D,
                                          .z = tokens(z),
                                          .delta_bias = in.delta_bias,
                                          .initial_state = in.initial_state};
  ScanGradients<float> expected = examples::run_backward(x, dy, {.chunk_size = 8});
  for (const ScanOptions& options : {ScanOptions{.chunk_size = 8}, scan_chunk(8)}) {
    const ScanResults<float> y = examples::run(x, options);
    Array<Storage> out = examples::zeros<Storage>(x.u.shape);
    Array<float> state = examples::unwritten<float>(x.state_shape());
    ScanSaved<float> saved;
    momentum_delta::scan_forward(stored,
                                 {.out = out.template view<ArrayView<Storage, 3>>(),
                                  .final_state = state.template view<ArrayView<float, 3>>()},
                                 saved, options);
    CHECK(equal_values(cast<float>(out), cast<float>(cast<Storage>(y.out))));
    CHECK(equal_values(state, y.final_state));
    if (options.algorithm == Algorithm::chunk) continue;

    ScanGradients<float> dx = examples::unwritten_gradients(x);
    Array<Storage> du = out, ddelta = out, dz = out, dB = examples::zeros<Storage>(x.B.shape), dC = dB;
    const ScanInputGradients<float> views = dx.views();
    momentum_delta::scan_backward(stored, saved,
                                  {.dout = tokens(dout), .dfinal_state = dy.views().dfinal_state},
                                  {.du = du.template view<ArrayView<Storage, 3>>(),
                                   .ddelta = ddelta.template view<ArrayView<Storage, 3>>(),
                                   .dA = views.dA,
                                   .dB = dB.template view<TokenView<Storage>>(),
                                   .dC = dC.template view<TokenView<Storage>>(),
                                   .dD = views.dD,
                                   .dz = dz.template view<ArrayView<Storage, 3>>(),
                                   .ddelta_bias = views.ddelta_bias,
                                   .dinitial_state = views.dinitial_state});
    dx.du = cast<float>(du);
    dx.ddelta = cast<float>(ddelta);
    dx.dz = cast<float>(dz);
    dx.dB = cast<float>(dB);
    dx.dC = cast<float>(dC);
    for (auto* a : {&expected.du, &expected.ddelta, &expected.dz, &expected.dB, &expected.dC})
      *a = cast<float>(cast<Storage>(*a));
    CHECK(equal_values(dx, expected));
  }
}

TEST_CASE("any number of threads gives the same bits") {
  const ScanShape shape =
      GENERATE(ScanShape{.B = 2, .T = 300, .D = 70, .G = 2, .N = 5}, ScanShape{.T = 70, .D = 900, .N = 3});
  const ScanProblem<float> x = random_scan(3, shape).as<float>();
  const ScanUpstream<float> dy = random_upstream(3, x.as<double>()).as<float>();
  for (ScanOptions options : {ScanOptions{.chunk_size = 16}, scan_chunk(16)}) {
    options.executor = nullptr;
    const ScanResults<float> y = examples::run(x, options);
    const ScanGradients<float> dx = examples::run_backward(x, dy, options);
    for (const int threads : {1, 2, 3, 5}) {
      ThreadPool pool(threads);
      options.executor = &pool;
      CHECK(equal_values(examples::run(x, options), y));
      CHECK(equal_values(examples::run_backward(x, dy, options), dx));
    }
  }
}

TEST_CASE("nothing is allocated once the workspace exists") {
  if (!heap_is_counted) return;
  const ScanProblem<float> x = random_scan(4, {.B = 2, .T = 100, .D = 40, .G = 2, .N = 5}).as<float>();
  const ScanUpstream<float> dy = random_upstream(4, x.as<double>()).as<float>();
  ScanResults<float> y{examples::unwritten<float>(x.u.shape), examples::unwritten<float>(x.state_shape())};
  ScanGradients<float> dx = examples::unwritten_gradients(x);
  Workspace workspace;
  ScanSaved<float> saved;
  ThreadPool pool(2);
  for (ScanOptions options : {scan_recurrent(), scan_chunk(16)}) {
    options.executor = &pool;
    options.workspace = &workspace;
    const auto call = [&] {
      momentum_delta::scan_forward(x.inputs(), y.outputs(), options);
      momentum_delta::scan_forward(x.inputs(), y.outputs(), saved, options);
      momentum_delta::scan_backward(x.inputs(), saved, dy.views(), dx.views(), options);
    };
    CHECK(allocations_of(call) > 0);
    CHECK(allocations_of(call) == 0);
    workspace = {};
    saved = {};
  }
}
