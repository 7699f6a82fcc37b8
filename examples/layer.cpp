// A MomentumDeltaNet layer: prefill a prompt, then decode token by token from the cache that it leaves.
#include <Eigen/Core>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>
#include <random>
#include <vector>

int main() {
  namespace md = momentum_delta;
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int T = 100, prompt = 80;
  const md::LayerConfig config{.hidden_size = 64, .num_heads = 2, .head_dim = 16, .head_v_dim = 32};

  std::vector<float> memory(md::parameter_count(config));  // weights are views: yours, or one array of all
  const md::LayerWeights<float> weights(config, memory.data());
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform;
  md::initialize_weights(config, weights, [&] { return uniform(random); });  // or load_weights
  const md::Layer<float> layer{config, weights};

  const Rows x = Rows::Random(T, 64);  // normalised hidden states
  Rows y(T, 64), expected(T, 64);
  md::layer_forward(layer, x, expected);

  md::LayerCache<float> cache(config);
  md::layer_forward(layer, x.topRows(prompt), y.topRows(prompt), {.cache = &cache});
  for (int t = prompt; t < T; ++t) md::layer_step(layer, x.row(t), y.row(t), cache);

  std::cout << "|y - one pass| / |one pass| = " << (y - expected).norm() / expected.norm() << "\n";
}
