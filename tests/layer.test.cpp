#include <momentum_delta/layer.hpp>

#include <functional>

#include "../examples/support/layer_case.hpp"
#include "support/catch.hpp"
#include "support/golden.hpp"
#include "support/problem.hpp"

using namespace test;
using examples::hidden_view;
using examples::LayerInMemory;
using momentum_delta::LayerCache;
using momentum_delta::LayerConfig;
using momentum_delta::LayerOptions;
using momentum_delta::LayerSaved;
using momentum_delta::LayerWeights;
using momentum_delta::TokenView;

namespace {

std::vector<LayerConfig> configs() {
  const LayerConfig plain{.hidden_size = 10, .num_heads = 2, .head_dim = 5, .head_v_dim = 7};
  LayerConfig grouped = plain, bare = plain;
  grouped.num_v_heads = 6;
  grouped.conv_size = 3;
  grouped.gate = momentum_delta::OutputGate::swish;
  grouped.gates.allow_neg_eigval = true;
  bare.use_short_conv = bare.use_output_correction = false;
  bare.gates.min_log_mu = -1.0;
  bare.tau_factor = 8;
  return {plain, grouped, bare};
}

template <class Scalar>
LayerInMemory<Scalar> random_layer(const LayerConfig& config, std::uint64_t seed) {
  LayerInMemory<Scalar> x(config);
  Random random(seed);
  momentum_delta::initialize_weights(config, x.weights(), [&] { return random.uniform(); });
  for (Scalar& w : x.weights().o_norm) w = Scalar(random.uniform(0.5, 1.5));
  for (Scalar& w : x.weights().A_log) w = Scalar(random.uniform(-1, 1));  // that something is remembered
  for (Scalar& w : x.weights().Mu_log) w = Scalar(random.uniform(-1, 1));
  return x;
}

template <class Scalar>
Array<Scalar> random_tokens(std::uint64_t seed, std::vector<Index> shape) {
  Random random(seed);
  Array<Scalar> x = examples::zeros<Scalar>(std::move(shape));
  for (Scalar& value : x.values) value = Scalar(float(random.normal()));
  return x;
}

template <class Scalar>
TokenView<const Scalar> in(const Array<Scalar>& x) {
  return hidden_view<TokenView<const Scalar>>(x);
}
template <class Scalar>
TokenView<Scalar> out(Array<Scalar>& x) {
  return hidden_view<TokenView<Scalar>>(x);
}

// Tokens [begin, end) of every batch, a view.
template <class View>
View tokens(View x, Index begin, Index end) {
  x.data += begin * x.stride[1];
  x.shape[1] = end - begin;
  return x;
}

template <class Scalar>
Array<Scalar> forward(const LayerInMemory<Scalar>& w, const Array<Scalar>& x,
                      const LayerOptions<Scalar>& options) {
  Array<Scalar> y = examples::unwritten<Scalar>(x.shape);
  momentum_delta::layer_forward(w.layer(), in(x), out(y), options);
  return y;
}

template <class Scalar>
double distance(const Array<Scalar>& x, const Array<Scalar>& y) {
  return examples::error_of(x, examples::cast<double>(y)).rel_rms;
}

struct Back {
  Array<double> dx;
  LayerInMemory<double> dweights;
};
Back gradients(const LayerInMemory<double>& w, const Array<double>& x, const Array<double>& dy,
               const LayerOptions<double>& options) {
  Back d{examples::unwritten<double>(x.shape), LayerInMemory<double>(w.config)};
  std::fill(d.dweights.memory.begin(), d.dweights.memory.end(), std::numeric_limits<double>::quiet_NaN());
  Array<double> y = examples::unwritten<double>(x.shape);
  LayerSaved<double> saved(2);
  momentum_delta::layer_forward(w.layer(), in(x), out(y), saved, options);
  momentum_delta::layer_backward(w.layer(), in(x), saved, in(dy),
                                 {.dx = out(d.dx), .dweights = d.dweights.weights()}, options);
  return d;
}

void refused(const std::function<void()>& call, const std::string& why) {
  try {
    call();
    FAIL("accepted: " << why);
  } catch (const std::invalid_argument& e) {
    INFO(e.what());
    CHECK(std::string(e.what()).find(why) != std::string::npos);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("golden layers, values and gradients, in both forms", "", float, double) {
  const auto files = golden_files(examples::layer_kind);
  REQUIRE(files.size() == 3);
  for (const auto& [path, file] : files) {
    const examples::LayerCase c = examples::read_layer_case(file);
    REQUIRE(c.values.size() == 3);
    REQUIRE(c.gradients.size() >= 16);
    for (const Options& rule : {recurrent(), chunk(1), chunk(5), chunk(64), Options{}}) {
      const auto y = examples::run_layer<TestType>(c, rule, /*backward=*/true);
      for (const auto* expected : {&c.values, &c.gradients}) {
        for (const auto& [name, tensor] : *expected) {
          INFO(path << " " << name);
          CHECK(examples::error_of(y.at(name), tensor).rel_rms <=
                (std::is_same_v<TestType, float> ? 1e-5 : 1e-11));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("prefill then decode is one full pass, for every split", "", float, double) {
  const double bound = std::is_same_v<TestType, float> ? 3e-6 : 1e-14;
  const Index B = 2, T = 9;
  for (const LayerConfig& config : configs()) {
    const auto w = random_layer<TestType>(config, 1);
    const auto x = random_tokens<TestType>(2, {B, T, config.hidden_size});
    for (const Options& rule : {recurrent(), chunk(4)}) {
      LayerCache<TestType> whole_cache(config, B);
      const auto whole = forward(w, x, {.cache = &whole_cache, .rule = rule});
      for (Index split = 0; split <= T; ++split) {
        LayerCache<TestType> cache(config, B);
        LayerSaved<TestType> scratch;
        auto y = examples::unwritten<TestType>(x.shape);
        momentum_delta::layer_forward(w.layer(), tokens(in(x), 0, split), tokens(out(y), 0, split),
                                      {.cache = &cache, .scratch = &scratch, .rule = rule});
        for (Index t = split; t < T; ++t)
          momentum_delta::layer_step(w.layer(), tokens(in(x), t, t + 1), tokens(out(y), t, t + 1), cache,
                                     {.scratch = &scratch});
        INFO("split at " << split);
        CHECK(distance(y, whole) <= bound);
        const auto state = [&](const std::vector<TestType>& values) {
          return Array<TestType>{{Index(values.size())}, values};
        };
        CHECK(distance(state(cache.S_values), state(whole_cache.S_values)) <= bound);
        CHECK(distance(state(cache.M_values), state(whole_cache.M_values)) <= bound);
        CHECK(cache.q_tail.size() == std::size_t(B * config.tail_rows() * config.key_dim()));
        CHECK(distance(state(cache.v_tail), state(whole_cache.v_tail)) <= bound);
      }
    }
  }
}

TEST_CASE("packed sequences are sequences of their own, gradients included") {
  const std::vector<Index> cu_seqlens{0, 5, 5, 6, 17};
  for (const LayerConfig& config : configs()) {
    const auto w = random_layer<double>(config, 3);
    const auto x = random_tokens<double>(4, {1, 17, config.hidden_size}),
               dy = random_tokens<double>(5, x.shape);
    LayerCache<double> cache(config, 4);
    Random random(6);
    for (auto* part : {&cache.S_values, &cache.M_values, &cache.q_tail, &cache.k_tail, &cache.v_tail})
      for (double& value : *part) value = random.normal();
    const LayerCache<double> start = cache;
    const auto y = forward(w, x, {.cu_seqlens = cu_seqlens, .cache = &cache});
    LayerCache<double> again = start;
    const Back d = gradients(w, x, dy, {.cu_seqlens = cu_seqlens, .cache = &again});

    std::vector<double> sum(w.memory.size());
    for (std::size_t n = 0; n + 1 < cu_seqlens.size(); ++n) {
      const Index begin = cu_seqlens[n], end = cu_seqlens[n + 1], hidden = config.hidden_size;
      const auto part = [&](const Array<double>& all) {
        return Array<double>{{1, end - begin, hidden},
                             {all.values.begin() + begin * hidden, all.values.begin() + end * hidden}};
      };
      const auto cache_of = [&](const LayerCache<double>& all) {
        LayerCache<double> one(config);
        const auto take = [&](std::vector<double>& to, const std::vector<double>& from) {
          std::copy_n(from.begin() + std::ptrdiff_t(n * to.size()), to.size(), to.begin());
        };
        take(one.S_values, all.S_values);
        take(one.M_values, all.M_values);
        take(one.q_tail, all.q_tail);
        take(one.k_tail, all.k_tail);
        take(one.v_tail, all.v_tail);
        return one;
      };
      LayerCache<double> own = cache_of(start);
      CHECK(distance(part(y), forward(w, part(x), {.cache = &own})) <= 1e-14);
      const LayerCache<double> end_state = cache_of(cache);
      CHECK(distance<double>({{1}, own.S_values}, {{1}, end_state.S_values}) <= 1e-14);
      CHECK(distance<double>({{1}, own.k_tail}, {{1}, end_state.k_tail}) <= 1e-14);
      own = cache_of(start);
      const Back own_d = gradients(w, part(x), part(dy), {.cache = &own});
      CHECK(distance(part(d.dx), own_d.dx) <= 1e-13);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += own_d.dweights.memory[i];
    }
    CHECK(distance<double>({{Index(sum.size())}, d.dweights.memory}, {{Index(sum.size())}, sum}) <= 1e-13);
  }
}

// In long double, five points: exact to 1e-12 or so.
TEST_CASE("the gradients of the layer are those of its loss") {
  std::vector<LayerConfig> all = configs();
  all.push_back({.hidden_size = 3, .num_heads = 1, .head_dim = 97, .head_v_dim = 101});  // convolved in parts
  for (const LayerConfig& config : all) {
    const auto w = random_layer<double>(config, 7);
    const auto x = random_tokens<double>(8, {2, 6, config.hidden_size}),
               dy = random_tokens<double>(9, x.shape);
    LayerCache<double> cache(config, 2);
    Random random(10);
    for (auto* part : {&cache.S_values, &cache.M_values, &cache.q_tail, &cache.k_tail, &cache.v_tail})
      for (double& value : *part) value = random.normal();
    const LayerCache<double> start = cache;
    const Back d = gradients(w, x, dy, {.cache = &cache});

    LayerInMemory<long double> wide(config);
    std::copy(w.memory.begin(), w.memory.end(), wide.memory.begin());
    Array<long double> wide_x = examples::cast<long double>(x);
    const auto loss = [&] {
      LayerCache<long double> state(config, 2);
      std::copy(start.S_values.begin(), start.S_values.end(), state.S_values.begin());
      std::copy(start.M_values.begin(), start.M_values.end(), state.M_values.begin());
      std::copy(start.q_tail.begin(), start.q_tail.end(), state.q_tail.begin());
      std::copy(start.k_tail.begin(), start.k_tail.end(), state.k_tail.begin());
      std::copy(start.v_tail.begin(), start.v_tail.end(), state.v_tail.begin());
      const auto y = forward(wide, wide_x, {.cache = &state, .rule = recurrent()});
      long double sum = 0;
      for (std::size_t i = 0; i < y.values.size(); ++i) sum += y.values[i] * dy.values[i];
      return sum;
    };
    const auto slope = [&](long double& variable) {
      const long double value = variable, h = 1e-4L;
      const auto at = [&](long double step) {
        variable = value + step;
        return loss();
      };
      const long double result = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      variable = value;
      return result;
    };
    const auto compare = [&](const char* name, std::span<const double> gradient, long double* variable) {
      double largest = 1e-3;
      for (const double g : gradient) largest = std::max(largest, std::abs(g));
      for (int sample = 0; sample < 6; ++sample) {
        const std::size_t i = random.bits() % gradient.size();
        INFO(name << " " << i);
        CHECK(std::abs(gradient[i] - slope(variable[i])) <= 1e-9 * largest);
      }
    };
    compare("x", d.dx.values, wide_x.values.data());
    momentum_delta::for_each_weight(
        config,
        [&](const char* name, const auto&, std::span<const double> gradient, std::span<long double> weight) {
          compare(name, gradient, weight.data());
        },
        momentum_delta::LayerWeights<const double>(config, d.dweights.memory.data()), wide.weights());
  }
}

TEST_CASE("any thread count gives the layer the same bits") {
  for (const LayerConfig& config : configs()) {
    const auto w = random_layer<double>(config, 11);
    const auto x = random_tokens<double>(12, {2, 150, config.hidden_size}),
               dy = random_tokens<double>(13, x.shape);
    const auto y = forward(w, x, {});
    const Back d = gradients(w, x, dy, {});
    for (const int threads : {2, 3}) {
      momentum_delta::ThreadPool pool(threads);
      const LayerOptions<double> options{.rule = {.executor = &pool}};
      CHECK(equal_values(forward(w, x, options), y));
      const Back threaded = gradients(w, x, dy, options);
      CHECK(equal_values(threaded.dx, d.dx));
      CHECK(threaded.dweights.memory == d.dweights.memory);
    }
  }
}

TEST_CASE("nothing of the layer looks ahead") {
  const LayerConfig config = configs()[1];
  const auto w = random_layer<double>(config, 14);
  auto x = random_tokens<double>(15, {1, 20, config.hidden_size});
  for (const Options& rule : {recurrent(), chunk(8)}) {
    const auto before = forward(w, x, {.rule = rule});
    const std::size_t kept = std::size_t(11 * config.hidden_size);
    auto edited = x;
    for (std::size_t i = kept; i < x.values.size(); ++i) edited.values[i] = -x.values[i];
    const auto after = forward(w, edited, {.rule = rule});
    CHECK(std::equal(before.values.begin(), before.values.begin() + std::ptrdiff_t(kept),
                     after.values.begin()));
    CHECK_FALSE(equal_values(before, after));
  }
}

TEST_CASE("any strides of x and y, gaps untouched; gradients are added to if wanted; no dx if not") {
  for (const LayerConfig& config : configs()) {
    const Index B = 3, T = 5, hidden = config.hidden_size;
    const auto w = random_layer<double>(config, 16);
    const auto x = random_tokens<double>(17, {B, T, hidden}), dy = random_tokens<double>(18, x.shape);
    const auto y = forward(w, x, {});
    const Back d = gradients(w, x, dy, {});

    const std::array<Index, 4> shape{B, T, 1, hidden}, stride{(T + 2) * (hidden + 3), hidden + 3, 0, 1};
    const auto spread = [&](const Array<double>& from) {
      std::vector<double> to(std::size_t(B * stride[0]), -7);
      for (Index b = 0; b < B; ++b)
        for (Index t = 0; t < T; ++t)
          std::copy_n(from.values.begin() + (b * T + t) * hidden, hidden,
                      to.begin() + b * stride[0] + t * stride[1]);
      return to;
    };
    const auto x_apart = spread(x), dy_apart = spread(dy);
    auto y_apart = spread(y), dx_apart = spread(d.dx);
    const auto y_expected = y_apart;
    auto dx_expected = spread(d.dx);
    for (std::size_t i = 0; i < dx_expected.size(); ++i)
      if (dx_expected[i] != -7) dx_expected[i] *= 2;
    for (double& value : y_apart)
      if (value != -7) value = std::numeric_limits<double>::quiet_NaN();
    LayerSaved<double> saved;
    momentum_delta::layer_forward<double>(w.layer(), {x_apart.data(), shape, stride},
                                          {y_apart.data(), shape, stride}, saved);
    CHECK(distance<double>({{1}, y_apart}, {{1}, y_expected}) <= 1e-14);
    auto dweights = d.dweights;
    momentum_delta::layer_backward<double>(
        w.layer(), {x_apart.data(), shape, stride}, saved, {dy_apart.data(), shape, stride},
        {.dx = {dx_apart.data(), shape, stride}, .dweights = dweights.weights(), .accumulate = true});
    CHECK(distance<double>({{1}, dx_apart}, {{1}, dx_expected}) <= 1e-13);
    auto twice = d.dweights.memory;
    for (double& value : twice) value *= 2;
    CHECK(distance<double>({{1}, dweights.memory}, {{1}, twice}) <= 1e-13);
    momentum_delta::layer_backward<double>(w.layer(), {x_apart.data(), shape, stride}, saved,
                                           {dy_apart.data(), shape, stride},
                                           {.dweights = dweights.weights()});
    CHECK(distance<double>({{1}, dweights.memory}, {{1}, d.dweights.memory}) <= 1e-13);
  }
}

// A power of two passes through a norm: o and do grow and shrink by it alone, though squares overflow.
TEMPLATE_TEST_CASE("the gated norm of rows whose squares overflow", "", float, double) {
  using momentum_delta::OutputGate, momentum_delta::detail::RowsMap;
  using Rows = momentum_delta::detail::Matrix<TestType>;
  const auto map = [](const Rows& x) {
    return RowsMap<TestType>(const_cast<TestType*>(x.data()), x.rows(), x.cols(),
                             Eigen::OuterStride<>(x.cols()));
  };
  const auto random = [](std::uint64_t seed) -> Rows {
    return Eigen::Map<const Rows>(random_tokens<TestType>(seed, {3, 11}).values.data(), 3, 11);
  };
  const int large = std::numeric_limits<TestType>::max_exponent - 20;
  const Rows o = random(21), g = random(22), dy = random(23);
  const std::vector<TestType> weight(std::size_t(o.cols()), TestType(0.75));
  for (const OutputGate gate : {OutputGate::sigmoid, OutputGate::swish}) {
    Rows y[2], d_o[2], dg[2], dw[2];
    for (const int i : {0, 1}) {
      const TestType factor = std::ldexp(TestType(1), i == 0 ? 20 : large);  // epsilon counts in neither
      const Rows scaled = factor * o;
      y[i] = d_o[i] = dg[i] = Rows::Zero(o.rows(), o.cols());
      dw[i] = Rows::Zero(1, o.cols());
      momentum_delta::detail::gated_norm<TestType>(map(scaled), map(g), weight, gate, 1e-12, map(y[i]));
      momentum_delta::detail::gated_norm_backward<TestType>(map(scaled), map(g), weight, gate, 1e-12, map(dy),
                                                            map(d_o[i]), map(dg[i]), dw[i].row(0));
      d_o[i] *= factor;
    }
    CHECK(y[0] == y[1]);
    CHECK(dg[0] == dg[1]);
    CHECK(dw[0] == dw[1]);
    CHECK(d_o[0] == d_o[1]);
    CHECK(y[0].norm() > 1);
  }
}

TEST_CASE("a layer over no tokens") {
  for (const LayerConfig& config : configs()) {
    const auto w = random_layer<double>(config, 19);
    for (const auto& [B, T] : {std::pair<Index, Index>{0, 3}, {2, 0}, {1, 0}}) {
      const auto x = examples::zeros<double>({B, T, config.hidden_size});
      LayerCache<double> cache(config, B);
      const Back d = gradients(w, x, x, {.cache = &cache});
      CHECK(d.dweights.memory == std::vector<double>(w.memory.size()));
    }
  }
}

TEST_CASE("weights of a checkpoint are named when they are missing or misshaped, and nothing is assigned") {
  const LayerConfig config = configs()[0];
  const auto source = random_layer<float>(config, 20);
  std::map<std::string, safetensors::Tensor> checkpoint;
  momentum_delta::for_each_weight(
      config,
      [&](const char* name, const momentum_delta::WeightShape& shape, std::span<const float> values) {
        const auto bytes = std::as_bytes(values);
        checkpoint["layers.3.attn." + std::string(name)] = {
            "F32", {shape.dimensions().begin(), shape.dimensions().end()}, {bytes.begin(), bytes.end()}};
      },
      source.layer().weights);
  LayerInMemory<double> to(config);
  const auto load = [&] {
    momentum_delta::load_weights(
        config, to.weights(),
        [&](const std::string& name) {
          const auto found = checkpoint.find(name);
          return found == checkpoint.end() ? nullptr : &found->second;
        },
        "layers.3.attn.");
  };
  load();
  CHECK(std::equal(to.memory.begin(), to.memory.end(), source.memory.begin()));

  checkpoint.erase("layers.3.attn.k_proj.weight");
  checkpoint.at("layers.3.attn.q_conv1d.weight").shape = {10, 4, 1};
  to.memory.assign(to.memory.size(), 7);
  refused(load, "layers.3.attn.k_proj.weight [10, 10] is missing");
  refused(load, "layers.3.attn.q_conv1d.weight has shape [10, 4, 1], not [10, 1, 4]");
  CHECK(to.memory == std::vector<double>(to.memory.size(), 7));
}

TEST_CASE("the published initialisation") {
  const LayerConfig config{.hidden_size = 16, .num_heads = 500, .head_dim = 1, .head_v_dim = 1};
  auto w = LayerInMemory<double>(config);
  Random random(21);
  momentum_delta::initialize_weights(config, w.weights(), [&] { return random.uniform(); });
  const auto spans = w.weights();
  const auto spread = [](std::span<const double> values, auto map, double lo, double hi) {
    double least = infinity, most = -infinity, mean = 0;
    for (const double value : values) {
      least = std::min(least, map(value));
      most = std::max(most, map(value));
      mean += map(value) / double(values.size());
    }
    const double width = hi - lo;
    CHECK(least >= lo);
    CHECK(most <= hi);
    CHECK(least <= lo + 0.05 * width);
    CHECK(most >= hi - 0.05 * width);
    CHECK(std::abs(mean - (lo + hi) / 2) <= 0.06 * width);
  };
  const auto exp = [](double x) { return std::exp(x); };
  spread(spans.A_log, exp, 0, 16);
  spread(spans.Mu_log, exp, 0, 16);
  spread(spans.log_factor, exp, 0, 4);
  spread(spans.D_log, exp, 0, 1);
  spread(
      spans.dt_bias, [](double x) { return std::log(momentum_delta::softplus(x)); }, std::log(1e-3) - 1e-12,
      std::log(0.1) + 1e-12);
  CHECK(std::equal(spans.dt_bias.begin(), spans.dt_bias.end(), spans.mu_bias.begin()));
  spread(
      spans.q_proj, [](double x) { return x; }, -0.25, 0.25);
  spread(
      spans.v_conv1d, [](double x) { return x; }, -0.5, 0.5);
  CHECK(spans.o_norm[0] == 1);
}

TEST_CASE("the layer refuses what it cannot use, names it, and writes nothing") {
  const LayerConfig config = configs()[0];
  const Index hidden = config.hidden_size;
  auto w = random_layer<double>(config, 22);
  auto x = random_tokens<double>(23, {2, 3, hidden});
  Array<double> y{x.shape, std::vector<double>(x.values.size(), 7)};
  LayerSaved<double> saved;
  LayerCache<double> cache(config, 2);
  cache.S_values.assign(cache.S_values.size(), 5);
  const auto run = [&](const LayerOptions<double>& options = {}) {
    momentum_delta::layer_forward(w.layer(), in(x), out(y), saved, options);
  };

  const auto configured = [&](const std::function<void(LayerConfig&)>& spoil, const std::string& why) {
    auto layer = w.layer();
    spoil(layer.config);
    refused([&] { momentum_delta::layer_forward(layer, in(x), out(y), saved); }, why);
    refused([&] { LayerCache<double> unusable(layer.config); }, why);
    refused([&] { momentum_delta::parameter_count(layer.config); }, why);
    refused([&] { LayerWeights<double> unusable(layer.config, nullptr); }, why);
  };
  configured([](LayerConfig& c) { c.hidden_size = 0; }, "config.hidden_size = 0 is not > 0 and finite");
  configured([](LayerConfig& c) { c.hidden_size = Index(1) << 60; }, "more elements than can be addressed");
  configured([](LayerConfig& c) { c.head_dim = c.head_v_dim = Index(1) << 32; },
             "more elements than can be addressed");
  refused([&] { LayerCache<double> unusable(config, Index(1) << 60); },
          "more elements than can be addressed");
  configured([](LayerConfig& c) { c.num_heads = -1; }, "config.num_heads = -1 is not > 0");
  configured([](LayerConfig& c) { c.num_v_heads = 3; },
             "config.num_v_heads = 3 is no multiple of config.num_heads = 2");
  configured([](LayerConfig& c) { c.conv_size = 0; }, "config.conv_size = 0 is not > 0");
  configured([](LayerConfig& c) { c.tau_factor = infinity; },
             "config.tau_factor = inf is not > 0 and finite");
  configured([](LayerConfig& c) { c.norm_eps = -1; }, "config.norm_eps = -1 is not > 0");

  auto layer = w.layer();
  layer.weights.D_log = {};
  refused([&] { momentum_delta::layer_forward(layer, in(x), out(y)); }, "D_log has 0 elements, not the 2");
  const auto with_D_log = random_layer<double>(config, 22);
  w.weights().D_log[1] = 1000;
  refused(run, "D_log[1] = 1000 has no finite exp");
  w = with_D_log;

  refused([&] { momentum_delta::layer_forward(w.layer(), {}, out(y)); }, "x is missing");
  refused([&] { momentum_delta::layer_forward(w.layer(), tokens(in(x), 0, 2), out(y)); },
          "y has shape [2, 3, 1, 10], not [B, T, 1, hidden] of x = [2, 2, 1, 10]");
  refused([&] { momentum_delta::layer_forward(w.layer(), in(x), out(x)); }, "y shares memory with x");
  LayerCache<double> three(config, 3);
  refused([&] { run({.cache = &three}); },
          "cache was made for another configuration or for other than 2 sequences");
  LayerCache<double> shortened = cache;
  shortened.v_tail.pop_back();
  refused([&] { run({.cache = &shortened}); }, "cache was made for another configuration");
  const TokenView<double> over_M(cache.M_values.data(), {2, 3, 1, hidden});
  refused([&] { momentum_delta::layer_forward(w.layer(), in(x), over_M, {.cache = &cache}); },
          "y shares memory with cache.M_values");
  const std::vector<Index> offsets{0, 3};
  refused([&] { run({.cu_seqlens = offsets}); }, "cu_seqlens needs B = 1");
  refused([&] { run({.cache = &cache, .rule = {.chunk_size = 0}}); }, "chunk_size = 0 is less than 1");
  x.values[31] = std::numeric_limits<double>::quiet_NaN();
  refused([&] { run({.cache = &cache}); }, "a[1, 0, 0] = nan is not a number");
  x.values[31] = 0;

  refused([&] { momentum_delta::layer_step(w.layer(), in(x), out(y), cache); }, "x has T = 3 tokens, not 1");
  const auto x1 = tokens(in(x), 0, 1);
  const auto y1 = tokens(out(y), 0, 1);
  refused([&] { momentum_delta::layer_step(w.layer(), x1, y1, cache, {.cache = &cache}); },
          "options.cache must be null");
  refused([&] { momentum_delta::layer_step(w.layer(), x1, y1, cache, {.rule = chunk(4)}); },
          "options.algorithm is chunk");

  LayerInMemory<double> d(config);
  d.memory.assign(d.memory.size(), 7);
  Array<double> dx = y;
  const auto back = [&](const LayerOptions<double>& options = {}) {
    momentum_delta::layer_backward(w.layer(), in(x), saved, in(x), {.dx = out(dx), .dweights = d.weights()},
                                   options);
  };
  refused(back, "saved holds no forward pass");
  Array<double> z = x;
  momentum_delta::layer_forward(w.layer(), in(x), out(z), saved, {.rule = chunk(2)});
  refused([&] { back({.rule = chunk(1)}); }, "options.rule.chunk_size = 1, but saved was made with 2");
  refused(
      [&] {
        momentum_delta::layer_backward(w.layer(), tokens(in(x), 0, 2), saved, tokens(in(x), 0, 2),
                                       {.dweights = d.weights()});
      },
      "saved is of a forward pass with B, T, N = 2, 3, 2, not 2, 2, 2");
  refused([&] { momentum_delta::layer_backward(w.layer(), in(x), saved, {}, {.dweights = d.weights()}); },
          "dy is missing");
  refused([&] { momentum_delta::layer_backward(w.layer(), in(x), saved, in(x), {}); },
          "dq_proj.weight has 0 elements, not the 100 that config calls for");
  refused([&] { momentum_delta::layer_backward(w.layer(), in(x), saved, in(x), {.dweights = w.weights()}); },
          "dq_proj.weight shares memory with q_proj.weight");

  CHECK(y.values == std::vector<double>(y.values.size(), 7));
  CHECK(dx.values == y.values);
  CHECK(d.memory == std::vector<double>(d.memory.size(), 7));
  CHECK(cache.S_values == std::vector<double>(cache.S_values.size(), 5));
  CHECK(cache.q_tail == std::vector<double>(cache.q_tail.size(), 0));
}
