// Multi-query associative recall (Arora et al. 2023, "Zoology"), with momentum and without: a sequence shows
// n pairs of a key and a value, then asks every key again in another order, and the model says the value. The
// same model, data and steps, once with mu learned and once with log_mu = -inf: the gated delta rule.
//
//   k_1 v_1 k_2 v_2 .. k_n v_n  k_5 k_2 ..      scored where a key is asked: v_5 v_2 ..
//
// `recall --help` says what it takes.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>

#include "kernels/kernels.hpp"
#include "support/arguments.hpp"
#include "support/chart.hpp"
#include "support/model.hpp"
#include "support/optimizer.hpp"
#include "support/progress.hpp"

using namespace examples;

namespace {

constexpr char usage[] =
    "usage: recall [options]\n"
    "Trains two models on recall of 4 to %d pairs and tells how often each is right.\n"
    "  --steps N      training steps of each (%lld)\n"
    "  --rate X       peak learning rate (%g)\n"
    "  --seed N       of weights and data (%lld)\n"
    "  --seeds N      that many runs, from that seed on (%lld)\n"
    "  --threads N    (as many as the machine has)\n"
    "  --figure FILE  draw the accuracies as SVG\n";

struct Arguments {
  Index steps = 1500, seed = 1, seeds = 2;
  int threads = std::max(1, int(std::thread::hardware_concurrency()));
  double rate = 3e-3;
  std::string figure;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (ArgumentReader reader(argc, argv); reader.next();) {
    const std::string& option = reader.option;
    const auto number = [&](auto& to, int lowest) {
      to = reader.number<std::remove_reference_t<decltype(to)>>(lowest);
    };
    if (option == "--steps")
      number(a.steps, 1);
    else if (option == "--rate")
      number(a.rate, 0);
    else if (option == "--seed")
      number(a.seed, 0);
    else if (option == "--seeds")
      number(a.seeds, 1);
    else if (option == "--threads")
      number(a.threads, 1);
    else if (option == "--figure")
      a.figure = reader.value();
    else
      throw UsageError("unknown option " + option);
  }
  return a;
}

constexpr int pairs[] = {4, 8, 16, 32};
constexpr int keys = 64, values = 64;  // tokens [0, keys) and [keys, keys + values)
constexpr Index pairs_a_step = 512, pairs_a_test = 8192;

// Small states, so that 32 pairs are many: two heads of 16 x 16.
constexpr ModelConfig config{.vocabulary = keys + values,
                             .blocks = 2,
                             .layer = {.hidden_size = 64, .num_heads = 2, .head_dim = 16, .head_v_dim = 16},
                             .mlp_size = 128};

// B sequences of n pairs, T = 3 n.
Batch recall_batch(Index B, int n, Random& random) {
  Batch batch{.B = B, .T = 3 * n, .tokens = {}, .targets = {}};
  std::vector<int> key(keys), value(keys);
  const auto shuffle = [&](auto begin, auto end) {
    for (auto i = end - begin; i > 1; --i) std::swap(begin[i - 1], begin[random.bits() % std::uint64_t(i)]);
  };
  for (Index b = 0; b < B; ++b) {
    std::iota(key.begin(), key.end(), 0);
    shuffle(key.begin(), key.end());
    for (int i = 0; i < n; ++i) {
      value[std::size_t(key[std::size_t(i)])] = keys + int(random.bits() % values);
      batch.tokens.insert(batch.tokens.end(), {key[std::size_t(i)], value[std::size_t(key[std::size_t(i)])]});
      batch.targets.insert(batch.targets.end(), {-1, -1});
    }
    shuffle(key.begin(), key.begin() + n);
    for (int i = 0; i < n; ++i) {
      batch.tokens.push_back(key[std::size_t(i)]);
      batch.targets.push_back(value[std::size_t(key[std::size_t(i)])]);
    }
  }
  return batch;
}

// exp(1000) times any softplus that a float holds is more than a float holds, so every log_mu is -inf, and
// its gradient, that of Mu_log too, is 0.
constexpr float no_momentum = 1000;

template <class Visit>
void for_each_Mu_log(Model<float>& model, const Visit& visit) {
  model.for_each_parameter([&](const std::string& name, const auto&, std::span<float> w, bool) {
    if (name.ends_with("Mu_log"))
      for (float& x : w) visit(x);
  });
}

// The accuracy at each number of pairs.
std::vector<double> train(const Arguments& a, Index seed, bool momentum, const md::Options& rule) {
  Model<float> model(config);
  const auto seeded = [&](Index use) { return Random(std::uint64_t(1000 * use + seed)); };
  Random initial = seeded(0), data = seeded(1), fresh = seeded(2);
  model.initialize(initial);
  if (!momentum) for_each_Mu_log(model, [](float& x) { x = no_momentum; });

  AdamW<float> optimizer(decays(model));
  const CosineSchedule schedule{
      .peak = a.rate, .floor = a.rate / 10, .warmup = std::min<Index>(50, a.steps), .steps = a.steps};
  std::fprintf(stderr, "seed %lld, momentum %s\n", static_cast<long long>(seed), momentum ? "on" : "off");
  Progress progress(0, a.steps);
  for (Index step = 0; step < a.steps; ++step) {
    const int n = pairs[data.bits() % std::size(pairs)];
    const double loss = model.forward(recall_batch(pairs_a_step / n, n, data), rule).loss;
    model.backward(rule);
    clip_norm(model.gradients(), 1);
    optimizer.step(model.parameters(), model.gradients(), schedule.rate(step));
    progress.update(step + 1, loss, (step + 1) * 3 * pairs_a_step);
  }
  progress.end();
  if (!momentum)
    for_each_Mu_log(model, [](float x) {
      if (x != no_momentum) throw std::logic_error("Mu_log has moved, so log_mu was not -inf");
    });

  std::vector<double> accuracy;
  for (const int n : pairs) {
    const Score score = model.evaluate(recall_batch(pairs_a_test / n, n, fresh), rule);
    accuracy.push_back(double(score.correct) / double(score.counted));
  }
  return accuracy;
}

int run(const Arguments& a) {
  md::ThreadPool pool(a.threads);
  md::Workspace workspace;
  const md::Options rule{.executor = &pool, .workspace = &workspace};
  std::printf("accuracy after %lld steps, mean of %lld seed%s (least to most); by chance %.3f\n",
              static_cast<long long>(a.steps), static_cast<long long>(a.seeds), a.seeds == 1 ? "" : "s",
              1. / values);
  std::printf("%-34s", "pairs");
  for (const int n : pairs) std::printf("%20d", n);
  std::printf("\n");
  std::fflush(stdout);

  Chart chart{.title = "Multi-query associative recall",
              .x_label = "pairs",
              .y_label = "accuracy",
              .series = {},
              .points = true,
              .log2_x = true,
              .names = Names::low,
              .y_min = 0,
              .y_max = 1};
  for (const bool momentum : {true, false}) {
    std::vector<std::vector<double>> runs;
    for (Index seed = a.seed; seed < a.seed + a.seeds; ++seed) runs.push_back(train(a, seed, momentum, rule));
    Series mean{momentum ? "momentum on, mu learned" : "momentum off, log_mu = -inf", {}, {}};
    std::printf("%-34s", mean.name.c_str());
    for (std::size_t i = 0; i < std::size(pairs); ++i) {
      double sum = 0, least = 1, most = 0;
      for (const auto& accuracy : runs) {
        sum += accuracy[i];
        least = std::min(least, accuracy[i]);
        most = std::max(most, accuracy[i]);
      }
      mean.x.push_back(pairs[i]);
      mean.y.push_back(sum / double(runs.size()));
      std::printf(" %.3f (%.3f-%.3f)", mean.y.back(), least, most);
    }
    std::printf("\n");
    std::fflush(stdout);
    chart.series.push_back(mean);
  }
  if (!a.figure.empty()) write_chart(a.figure, chart);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (std::any_of(argv + 1, argv + argc, [](const std::string& s) { return s == "--help"; })) {
      const Arguments a;
      std::printf(usage, pairs[std::size(pairs) - 1], static_cast<long long>(a.steps), a.rate,
                  static_cast<long long>(a.seed), static_cast<long long>(a.seeds));
      return 0;
    }
    return run(parse(argc, argv));
  } catch (const UsageError& e) {
    std::fprintf(stderr, "recall: %s; --help says more\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "recall: %s\n", e.what());
    return 1;
  }
}
