#include "../../examples/support/model.hpp"

#include <map>

#include "../../examples/kernels/kernels.hpp"
#include "../support/catch.hpp"

using namespace examples;

namespace {

constexpr int vocabulary = 11;

ModelConfig small_config(bool tied) {
  return {.vocabulary = vocabulary,
          .blocks = 2,
          .layer = {.hidden_size = 6, .num_heads = 1, .num_v_heads = 2, .head_dim = 4, .head_v_dim = 3},
          .mlp_size = 5,
          .tied_head = tied};
}

// Every third position does not count.
Batch random_batch(std::uint64_t seed, Index B, Index T) {
  Random random(seed);
  Batch batch{.B = B, .T = T, .tokens = {}, .targets = {}};
  for (Index i = 0; i < B * T; ++i) {
    batch.tokens.push_back(int(random.bits() % vocabulary));
    batch.targets.push_back(i % 3 == 1 ? -1 : int(random.bits() % vocabulary));
  }
  return batch;
}

// Initialised, and then every parameter moved, so that none is at a special value.
template <class Scalar>
void randomize(Model<Scalar>& model, std::uint64_t seed) {
  Random random(seed);
  model.initialize(random);
  for (Scalar& w : model.parameters()) w += Scalar(0.1 * random.normal());
}

}  // namespace

TEST_CASE("the model's gradients are the slopes of its loss, for every kind of parameter") {
  const bool tied = GENERATE(false, true);
  const md::Options rule{.algorithm = GENERATE(md::Algorithm::recurrent, md::Algorithm::chunk),
                         .chunk_size = 4};
  Model<double> model(small_config(tied));
  randomize(model, 1);
  const Batch batch = random_batch(2, 2, 9);
  const Score score = model.forward(batch, rule);
  CHECK(score.counted == 12);
  model.backward(rule);
  const std::vector<double> gradients(model.gradients().begin(), model.gradients().end());

  model.for_each_parameter([&](const std::string& name, const auto&, std::span<double> w, bool) {
    const std::size_t offset = std::size_t(w.data() - model.parameters().data());
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double at = w[i], h = 2e-5;  // some q are short, and their direction bends on such a scale
      const auto loss = [&](double x) {
        w[i] = x;
        return model.evaluate(batch, rule).loss;
      };
      const double slope =
          (8 * (loss(at + h) - loss(at - h)) - (loss(at + 2 * h) - loss(at - 2 * h))) / (12 * h);
      w[i] = at;
      worst = std::max(worst, std::abs(slope - gradients[offset + i]));
      largest = std::max(largest, std::abs(slope));
    }
    INFO(name << ": " << worst << " of " << largest);
    CHECK(worst <= 1e-7 * std::max(largest, 1e-2));
  });
}

TEST_CASE("the model's gradients are the same bits for every number of threads, and twice") {
  const auto gradients = [](md::Executor* executor) {
    Model<float> model(small_config(true));
    randomize(model, 3);
    const Batch batch = random_batch(4, 3, 100);
    for (int i = 0; i < 2; ++i) {
      model.forward(batch, {.executor = executor});
      model.backward({.executor = executor});
    }
    return std::vector<float>(model.gradients().begin(), model.gradients().end());
  };
  md::ThreadPool two(2), three(3);
  const std::vector<float> serial = gradients(nullptr);
  CHECK(gradients(&two) == serial);
  CHECK(gradients(&three) == serial);
}

TEST_CASE("prefill and then steps give the logits of one pass") {
  Model<double> model(small_config(false));
  randomize(model, 5);
  const Index B = 2, T = 12;
  Batch batch = random_batch(6, B, T);
  // Cross entropies of every position, one position counted at a time.
  const auto loss_at = [&](Index b, Index t, int target) {
    std::fill(batch.targets.begin(), batch.targets.end(), -1);
    batch.targets[std::size_t(b * T + t)] = target;
    return model.evaluate(batch).loss;
  };
  for (const Index split : {0, 1, 2, 7}) {
    Model<double>::Cache cache = model.make_cache(B);
    Batch prompt{.B = B, .T = split, .tokens = {}, .targets = std::vector<int>(std::size_t(B * split), -1)};
    for (Index b = 0; b < B; ++b)
      for (Index t = 0; t < split; ++t) prompt.tokens.push_back(batch.tokens[std::size_t(b * T + t)]);
    if (split > 0) CHECK(model.evaluate(prompt, {}, &cache).counted == 0);
    for (Index t = split; t < T; ++t) {
      const std::vector<int> tokens = {batch.tokens[std::size_t(t)], batch.tokens[std::size_t(T + t)]};
      const Eigen::MatrixXd logits = model.step(tokens, cache);
      for (Index b = 0; b < B; ++b) {
        const double expected = std::log(logits.row(b).array().exp().sum()) - logits(b, 3);
        CHECK(std::abs(loss_at(b, t, 3) - expected) < 1e-12);
      }
    }
  }
}

TEST_CASE("parameters are named, laid out in order, and say whether they decay") {
  const bool tied = GENERATE(false, true);
  Model<float> model(small_config(tied));
  std::map<std::string, bool> decaying;
  const float* next = model.parameters().data();
  model.for_each_parameter(
      [&](const std::string& name, const md::WeightShape& shape, std::span<float> w, bool decays) {
        CHECK(w.data() == next);
        CHECK(Index(w.size()) == shape.count());
        next += w.size();
        decaying[name] = decays;
      });
  CHECK(next == model.parameters().data() + model.parameters().size());
  CHECK(decaying.contains("lm_head.weight") == !tied);
  CHECK(decaying.size() == 1 + 2 * (5 + 19) + 1 + (tied ? 0 : 1));
  for (const char* name : {"model.layers.0.attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight",
                           "model.layers.1.attn.v_conv1d.weight"})
    CHECK(decaying.at(name));
  for (const char* name :
       {"model.embeddings.weight", "model.layers.0.attn_norm.weight", "model.norm.weight",
        "model.layers.1.attn.o_norm.weight", "model.layers.0.attn.A_log", "model.layers.0.attn.Mu_log",
        "model.layers.0.attn.log_factor", "model.layers.0.attn.dt_bias", "model.layers.0.attn.mu_bias",
        "model.layers.0.attn.D_log", "model.layers.1.mlp_norm.weight"})
    CHECK_FALSE(decaying.at(name));
}

TEST_CASE("the score counts the targets >= 0") {
  Model<float> model(small_config(true));
  Random random(7);
  model.initialize(random);
  Batch batch = random_batch(8, 1, 6);
  const Score score = model.forward(batch);
  CHECK(score.counted == 4);
  CHECK(score.correct <= 4);
  batch.targets.assign(6, -1);
  const Score none = model.forward(batch);
  CHECK(none.counted == 0);
  CHECK(none.loss == 0);
  model.backward();
  for (const float d : model.gradients()) CHECK(d == 0);
}

TEST_CASE("the model refuses what it cannot take") {
  Model<float> model(small_config(true));
  Random random(9);
  model.initialize(random);
  CHECK_THROWS_AS(model.backward(), std::logic_error);
  const Batch good = random_batch(10, 1, 4);
  model.forward(good);
  model.evaluate(good);
  CHECK_THROWS_AS(model.backward(), std::logic_error);  // it is forward() that keeps
  Batch bad = good;
  bad.tokens[2] = vocabulary;
  CHECK_THROWS_AS(model.forward(bad), std::invalid_argument);
  bad = good;
  bad.targets[0] = vocabulary;
  CHECK_THROWS_AS(model.forward(bad), std::invalid_argument);
  bad = good;
  bad.targets.pop_back();
  CHECK_THROWS_AS(model.forward(bad), std::invalid_argument);
  bad = good;
  bad.T = 5;
  CHECK_THROWS_AS(model.forward(bad), std::invalid_argument);
  ModelConfig config = small_config(true);
  config.layer.head_dim = 0;
  CHECK_THROWS_AS(Model<float>(config), std::invalid_argument);
  config = small_config(true);
  config.mlp_size = 0;
  CHECK_THROWS_AS(Model<float>(config), std::invalid_argument);
}
