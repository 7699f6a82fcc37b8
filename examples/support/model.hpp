// A language model on MomentumDeltaNet layers. For tokens of a vocabulary:
//
//   x = E[token]                                                   embeddings
//   x = x + layer(norm(x)),  x = x + mlp(norm(x))                  each block; momentum_delta/layer.hpp
//   logits = W norm(x)                                             W is E, or a weight of its own
//
//   norm(x) = x / sqrt(mean(x^2) + eps) w                          RMS norm
//   mlp(x) = W_down (silu(W_gate x) W_up x)                        gated MLP (SwiGLU)
//
// All parameters are one array, and so are their gradients: optimizer, clipping and checkpoint are loops.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <momentum_delta/layer.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "product.hpp"
#include "random.hpp"

namespace examples {

namespace md = momentum_delta;

struct ModelConfig {
  Index vocabulary = 256;
  Index blocks = 2;
  md::LayerConfig layer{};  // its hidden_size is the model's
  Index mlp_size = 0;       // rows of W_gate and W_up
  bool tied_head = true;    // W is E
  double norm_eps = 1e-5;
};

// B sequences of T tokens, row-major.
struct Batch {
  Index B = 0, T = 0;
  std::vector<int> tokens;   // [B, T] in [0, vocabulary)
  std::vector<int> targets;  // [B, T] what each position should predict; < 0: it does not count
};

// Of the positions whose target counts: their number, their mean cross entropy in nats (0 if there are none),
// and at how many of them the largest logit is the target's.
struct Score {
  double loss = 0;
  Index counted = 0, correct = 0;
};

template <class Scalar>
struct BlockWeights {
  std::span<Scalar> attn_norm;  // [hidden]
  md::LayerWeights<Scalar> attn;
  std::span<Scalar> mlp_norm;  // [hidden]
  std::span<Scalar> gate, up;  // [mlp_size, hidden]
  std::span<Scalar> down;      // [hidden, mlp_size]
};

template <class Scalar>
struct ModelWeights {
  std::span<Scalar> embeddings;  // [vocabulary, hidden]
  std::vector<BlockWeights<Scalar>> blocks;
  std::span<Scalar> norm;  // [hidden]
  std::span<Scalar> head;  // [vocabulary, hidden]; if tied, the embeddings

  // Views of one array, in the order of for_each_parameter.
  ModelWeights(const ModelConfig& c, std::span<Scalar> all);
};

// visit(name, shape, decays, spans...) for every parameter of any number of ModelWeights at once. `decays`:
// is it a matrix that weight decay is for? Norms, gate parameters and embeddings are not.
template <class Visit, class... Weights>
void for_each_parameter(const ModelConfig& c, const Visit& visit, Weights&... w) {
  using Shape = md::WeightShape;
  const Index hidden = c.layer.hidden_size;
  visit("model.embeddings.weight", Shape{c.vocabulary, hidden}, false, w.embeddings...);
  for (Index i = 0; i < c.blocks; ++i) {
    const std::string block = "model.layers." + std::to_string(i) + ".";
    [[maybe_unused]] const auto at = std::size_t(i);
    visit(block + "attn_norm.weight", Shape{hidden}, false, w.blocks[at].attn_norm...);
    md::for_each_weight(
        c.layer,
        [&](const char* name, const Shape& shape, auto&... spans) {
          visit(block + "attn." + name, shape, shape.rank > 1, spans...);
        },
        w.blocks[at].attn...);
    visit(block + "mlp_norm.weight", Shape{hidden}, false, w.blocks[at].mlp_norm...);
    visit(block + "mlp.gate_proj.weight", Shape{c.mlp_size, hidden}, true, w.blocks[at].gate...);
    visit(block + "mlp.up_proj.weight", Shape{c.mlp_size, hidden}, true, w.blocks[at].up...);
    visit(block + "mlp.down_proj.weight", Shape{hidden, c.mlp_size}, true, w.blocks[at].down...);
  }
  visit("model.norm.weight", Shape{hidden}, false, w.norm...);
  if (!c.tied_head) visit("lm_head.weight", Shape{c.vocabulary, hidden}, true, w.head...);
}

inline Index parameter_count(const ModelConfig& c) {
  Index count = 0;
  for_each_parameter(c,
                     [&](const std::string&, const md::WeightShape& shape, bool) { count += shape.count(); });
  return count;
}

template <class Scalar>
ModelWeights<Scalar>::ModelWeights(const ModelConfig& c, std::span<Scalar> all)
    : blocks(std::size_t(c.blocks)) {
  std::size_t used = 0;
  const auto place = [&](const std::string&, const md::WeightShape& shape, bool, std::span<Scalar>& w) {
    w = all.subspan(used, std::size_t(shape.count()));
    used += w.size();
  };
  for_each_parameter(c, place, *this);
  if (c.tied_head) head = embeddings;
}

// y = norm(x), row by row.
template <class Scalar, class X>
void rms_norm(Executor* executor, const X& x, std::span<const Scalar> weight, double eps, Matrix<Scalar>& y) {
  const auto w = matrix(weight, 1);
  y.resize(x.rows(), x.cols());
  for_each_rows(executor, x.rows(), [&](Index begin, Index count) {
    for (Index t = begin; t < begin + count; ++t) {
      const Scalar r = 1 / std::sqrt(x.row(t).squaredNorm() / Scalar(x.cols()) + Scalar(eps));
      y.row(t) = (r * x.row(t)).cwiseProduct(w);
    }
  });
}

// From dy: dx and dweight are added to. With n = r x, the rows of a norm:
//   dn = dy w     dx += r (dn - n mean(n dn))     dw += sum dy n
template <class Scalar, class X, class DX>
void rms_norm_backward(Executor* executor, const X& x, std::span<const Scalar> weight, double eps,
                       const Matrix<Scalar>& dy, DX&& dx, std::span<Scalar> dweight) {
  const auto w = matrix(weight, 1);
  Matrix<Scalar> dw = Matrix<Scalar>::Zero(task_count(x.rows()), x.cols());  // a sum for each task
  for_each_rows(executor, x.rows(), [&](Index begin, Index count) {
    Matrix<Scalar> n(1, x.cols()), dn(1, x.cols());
    for (Index t = begin; t < begin + count; ++t) {
      const Scalar r = 1 / std::sqrt(x.row(t).squaredNorm() / Scalar(x.cols()) + Scalar(eps));
      n = r * x.row(t);
      dn = dy.row(t).cwiseProduct(w);
      dw.row(begin / task_rows) += dy.row(t).cwiseProduct(n);
      dx.row(t) += r * (dn - n.cwiseProduct(dn).mean() * n);
    }
  });
  if (dw.rows() > 0) matrix(dweight, 1) += dw.colwise().sum();
}

template <class Scalar>
class Model {
 public:
  using Rows = Matrix<Scalar>;
  using Cache = std::vector<md::LayerCache<Scalar>>;  // one for each block

  // Throws std::invalid_argument if a size is not positive.
  explicit Model(const ModelConfig& c)
      : config_(checked(c)),
        parameters_(std::size_t(parameter_count(c))),
        gradients_(parameters_.size()),
        weights_(c, parameters_),
        d_(c, gradients_),
        blocks_(std::size_t(c.blocks)) {}
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }
  std::span<Scalar> parameters() { return parameters_; }
  std::span<const Scalar> parameters() const { return parameters_; }
  std::span<const Scalar> gradients() const { return gradients_; }
  std::span<Scalar> gradients() { return gradients_; }

  // visit(name, shape, span, decays), in the order in which parameters() holds them.
  template <class Visit>
  void for_each_parameter(const Visit& visit) {
    examples::for_each_parameter(
        config_,
        [&](const std::string& name, const md::WeightShape& shape, bool decays, std::span<Scalar> w) {
          visit(name, shape, w, decays);
        },
        weights_);
  }

  // The layer as published (initialize_weights); others ~ U(-1, 1) / sqrt(fan in); norms 1; embeddings
  // normal of variance 1 / hidden, so that a tied head's logits have variance 1.
  void initialize(Random& random) {
    const auto fill = [&](const std::string&, const md::WeightShape& shape, std::span<Scalar> w, bool) {
      const double bound = 1 / std::sqrt(double(shape.count() / shape.sizes[0]));
      for (Scalar& x : w) x = shape.rank == 1 ? Scalar(1) : Scalar(random.uniform(-bound, bound));
    };
    for_each_parameter(fill);
    for (BlockWeights<Scalar>& block : weights_.blocks)
      md::initialize_weights(config_.layer, block.attn, [&] { return random.uniform(); });
    const double deviation = 1 / std::sqrt(double(config_.layer.hidden_size));
    for (Scalar& x : weights_.embeddings) x = Scalar(deviation * random.normal());
  }

  // Scores a batch and keeps what backward() needs. `rule` says which form the rule takes, and its executor
  // runs everything. Throws std::invalid_argument if a token or target is not in the vocabulary.
  Score forward(const Batch& batch, const md::Options& rule = {}) {
    run_blocks(batch.tokens, batch.B, batch.T, rule, [&](std::size_t i, auto x, auto y, auto options) {
      md::layer_forward(layer(i), x, y, blocks_[i].saved, options);
    });
    const Score score = cross_entropy(batch.targets, rule.executor);
    tokens_ = batch.tokens;
    kept_ = true;
    return score;
  }

  // The same score, keeping nothing. With a cache of batch.B sequences the tokens continue from it, and it is
  // moved on: prefill.
  Score evaluate(const Batch& batch, const md::Options& rule = {}, Cache* cache = nullptr) {
    run_blocks(batch.tokens, batch.B, batch.T, rule, [&](std::size_t i, auto x, auto y, auto options) {
      options.scratch = &blocks_[i].saved;
      options.cache = cache ? &cache->at(i) : nullptr;
      md::layer_forward(layer(i), x, y, options);
    });
    return cross_entropy(batch.targets, rule.executor);
  }

  // One token of each sequence: logits [B, vocabulary] of what follows, valid until the next call. The cache
  // is moved on.
  const Rows& step(std::span<const int> tokens, Cache& cache, const md::Options& rule = {}) {
    run_blocks(tokens, Index(tokens.size()), 1, rule, [&](std::size_t i, auto x, auto y, auto options) {
      options.scratch = &blocks_[i].saved;
      md::layer_step(layer(i), x, y, cache.at(i), options);
    });
    rms_norm<Scalar>(rule.executor, x_, weights_.norm, config_.norm_eps, normed_);
    logits_.resize(x_.rows(), config_.vocabulary);
    multiply(rule.executor, logits_, normed_, head().transpose());
    return logits_;
  }
  Cache make_cache(Index sequences = 1) const {
    return Cache(std::size_t(config_.blocks), md::LayerCache<Scalar>(config_.layer, sequences));
  }

  // gradients() of the loss that the last call, forward(), returned, by parameters(), which must be as they
  // were. Throws std::logic_error if the last call was another.
  void backward(const md::Options& rule = {}) {
    if (!kept_) throw std::logic_error("Model::backward: the last call was not forward()");
    const md::Options options = with_workspace(rule);
    Executor* const executor = rule.executor;
    const Index n = x_.rows(), hidden = config_.layer.hidden_size, mlp = config_.mlp_size;
    std::fill(gradients_.begin(), gradients_.end(), Scalar(0));

    // loss = cross entropy of (norm(x) W^T), of the rows that count
    dx_.setZero(n, hidden);
    cross_entropy_backward(executor);

    for (std::size_t i = blocks_.size(); i-- > 0;) {
      BlockRows& r = blocks_[i];
      const BlockWeights<Scalar>&w = weights_.blocks[i], &dw = d_.blocks[i];
      // x = mid + act W_down^T; dx is now that by mid, as far as it goes past the MLP
      dact_.resize(n, mlp);
      multiply(executor, dact_, dx_, matrix(w.down, hidden));
      multiply_add(executor, matrix(dw.down, hidden), dx_.transpose(), r.act);
      // act = silu(gate) up, and silu'(g) = s + g s (1 - s), s = sigmoid(g)
      dgate_.resize(n, mlp);
      dup_.resize(n, mlp);
      for_each_rows(executor, n, [&](Index begin, Index count) {
        const auto rows = [&](Rows& m) { return m.middleRows(begin, count).array(); };
        auto s = rows(dgate_);
        s = sigmoid(rows(r.gate));
        rows(dup_) = rows(dact_) * rows(r.gate) * s;
        rows(dgate_) = rows(dact_) * rows(r.up) * (s + rows(r.gate) * s * (1 - s));
      });
      // gate = mlp_in W_gate^T, up = mlp_in W_up^T
      multiply_add(executor, matrix(dw.gate, mlp), dgate_.transpose(), r.mlp_in);
      multiply_add(executor, matrix(dw.up, mlp), dup_.transpose(), r.mlp_in);
      dnormed_.resize(n, hidden);
      multiply(executor, dnormed_, dgate_, matrix(w.gate, mlp));
      multiply_add(executor, dnormed_, dup_, matrix(w.up, mlp));
      // mlp_in = norm(mid)
      rms_norm_backward<Scalar>(executor, r.mid, w.mlp_norm, config_.norm_eps, dnormed_, dx_, dw.mlp_norm);
      // mid = x + layer(attn_in)
      md::layer_backward<Scalar>(layer(i), view(r.attn_in), r.saved, view(dx_),
                                 {.dx = view(dnormed_), .dweights = dw.attn}, {.rule = options});
      // attn_in = norm(x)
      rms_norm_backward<Scalar>(executor, r.x, w.attn_norm, config_.norm_eps, dnormed_, dx_, dw.attn_norm);
    }

    // x = E[token]
    auto dE = matrix(d_.embeddings, config_.vocabulary);
    for (Index t = 0; t < n; ++t) dE.row(tokens_[std::size_t(t)]) += dx_.row(t);
  }

 private:
  // Between the input and the output of one block, n = B T rows each.
  struct BlockRows {
    Rows x, attn_in;  // [n, hidden]    input, and its norm
    md::LayerSaved<Scalar> saved;
    Rows mid, mlp_in;    // [n, hidden]    x + layer(attn_in), and its norm
    Rows gate, up, act;  // [n, mlp_size]  projections, and silu(gate) up
  };
  static constexpr Index head_rows = 512;  // whose logits are held at a time

  static const ModelConfig& checked(const ModelConfig& c) {
    if (c.vocabulary < 1 || c.blocks < 1 || c.mlp_size < 1 || c.layer.hidden_size < 1)
      throw std::invalid_argument("Model: vocabulary, blocks, mlp_size and layer.hidden_size must be >= 1");
    (void)md::LayerCache<Scalar>(c.layer, 0);  // checks the rest of the layer's configuration
    return c;
  }
  template <class Array>
  static auto sigmoid(const Array& x) {
    return (1 + (-x).exp()).inverse();
  }

  md::Layer<Scalar> layer(std::size_t i) const { return {config_.layer, weights_.blocks[i].attn}; }
  auto head() const { return matrix(weights_.head, config_.vocabulary); }
  md::TokenView<Scalar> view(Rows& m) const { return {m.data(), shape_}; }
  md::Options with_workspace(md::Options rule) {
    if (!rule.workspace) rule.workspace = &workspace_;
    return rule;
  }

  // x_ = what the last block gives. run_layer(i, x, y, options) is the layer of block i.
  template <class RunLayer>
  void run_blocks(std::span<const int> tokens, Index B, Index T, const md::Options& rule,
                  const RunLayer& run_layer) {
    Executor* const executor = rule.executor;
    const Index n = B * T, hidden = config_.layer.hidden_size, mlp = config_.mlp_size;
    kept_ = false;
    shape_ = {B, T, 1, hidden};
    if (Index(tokens.size()) != n) throw std::invalid_argument("Model: tokens must be [B, T]");
    for (const int token : tokens)
      if (token < 0 || token >= config_.vocabulary)
        throw std::invalid_argument("Model: token " + std::to_string(token) + " is not in the vocabulary");

    // x = E[token]
    const auto E = matrix(weights_.embeddings, config_.vocabulary);
    x_.resize(n, hidden);
    for (Index t = 0; t < n; ++t) x_.row(t) = E.row(tokens[std::size_t(t)]);

    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      BlockRows& r = blocks_[i];
      const BlockWeights<Scalar>& w = weights_.blocks[i];
      // mid = x + layer(norm(x))
      r.x.swap(x_);
      rms_norm<Scalar>(executor, r.x, w.attn_norm, config_.norm_eps, r.attn_in);
      r.mid.resize(n, hidden);
      run_layer(i, md::TokenView<const Scalar>(view(r.attn_in)), view(r.mid),
                md::LayerOptions<Scalar>{.rule = with_workspace(rule)});
      r.mid += r.x;
      // act = silu(gate) up, of norm(mid)
      rms_norm<Scalar>(executor, r.mid, w.mlp_norm, config_.norm_eps, r.mlp_in);
      r.gate.resize(n, mlp);
      r.up.resize(n, mlp);
      r.act.resize(n, mlp);
      multiply(executor, r.gate, r.mlp_in, matrix(w.gate, mlp).transpose());
      multiply(executor, r.up, r.mlp_in, matrix(w.up, mlp).transpose());
      for_each_rows(executor, n, [&](Index begin, Index count) {
        const auto rows = [&](Rows& m) { return m.middleRows(begin, count).array(); };
        rows(r.act) = rows(r.gate) * sigmoid(rows(r.gate)) * rows(r.up);
      });
      // x = mid + act W_down^T
      x_ = r.mid;
      multiply_add(executor, x_, r.act, matrix(w.down, hidden).transpose());
    }
  }

  // The m rows of x_ whose target counts go through the head, head_rows at a time. Also keeps the rows, their
  // targets and log_sum_ = log(sum(exp(logits))), from which the backward pass has the softmax.
  Score cross_entropy(std::span<const int> targets, Executor* executor) {
    if (Index(targets.size()) != x_.rows()) throw std::invalid_argument("Model: targets must be [B, T]");
    counted_.clear();
    targets_.clear();
    for (std::size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] >= config_.vocabulary)
        throw std::invalid_argument("Model: target " + std::to_string(targets[t]) +
                                    " is not in the vocabulary");
      if (targets[t] < 0) continue;
      counted_.push_back(Index(t));
      targets_.push_back(targets[t]);
    }
    const Index m = Index(counted_.size());
    counted_x_ = x_(counted_, Eigen::all);
    rms_norm<Scalar>(executor, counted_x_, weights_.norm, config_.norm_eps, normed_);

    log_sum_.resize(m);
    loss_.resize(m);
    correct_.resize(m);
    for_each_head_rows(executor, [&](Index begin, Index t) {
      Index best = 0;
      const auto logits = logits_.row(t);
      const Scalar largest = logits.maxCoeff(&best);
      const int target = targets_[std::size_t(begin + t)];
      log_sum_[begin + t] = largest + std::log((logits.array() - largest).exp().sum());
      loss_[begin + t] = log_sum_[begin + t] - logits[target];
      correct_[begin + t] = best == target;
    });
    return {.loss = m == 0 ? 0 : loss_.template cast<double>().sum() / double(m),
            .counted = m,
            .correct = correct_.sum()};
  }

  // visit(begin, t) with the logits of row begin + t of normed_ in row t of logits_.
  template <class Visit>
  void for_each_head_rows(Executor* executor, const Visit& visit, const auto&... after) {
    for (Index begin = 0; begin < normed_.rows(); begin += head_rows) {
      const Index count = std::min(head_rows, normed_.rows() - begin);
      logits_.resize(count, config_.vocabulary);
      multiply(executor, logits_, normed_.middleRows(begin, count), head().transpose());
      for_each_rows(executor, count, [&](Index first, Index rows) {
        for (Index t = first; t < first + rows; ++t) visit(begin, t);
      });
      (after(begin, count), ...);
    }
  }

  // dx_ is added to, at the rows that count.
  void cross_entropy_backward(Executor* executor) {
    const Index m = normed_.rows();
    dnormed_.resize(m, normed_.cols());
    auto dW = matrix(d_.head, config_.vocabulary);
    for_each_head_rows(
        executor,
        [&](Index begin, Index t) {
          // loss = mean(log(sum(exp(logits))) - logits[target]); logits become their gradients
          auto logits = logits_.row(t);
          logits = (logits.array() - log_sum_[begin + t]).exp().matrix() / Scalar(m);
          logits[targets_[std::size_t(begin + t)]] -= 1 / Scalar(m);
        },
        [&](Index begin, Index count) {
          // logits = normed W^T
          multiply(executor, dnormed_.middleRows(begin, count), logits_, head());
          multiply_add(executor, dW, logits_.transpose(), normed_.middleRows(begin, count));
        });
    // normed = norm(x)
    Rows dcounted_x = Rows::Zero(m, normed_.cols());
    rms_norm_backward<Scalar>(executor, counted_x_, weights_.norm, config_.norm_eps, dnormed_, dcounted_x,
                              d_.norm);
    dx_(counted_, Eigen::all) += dcounted_x;
  }

  ModelConfig config_;
  Vector<Scalar> parameters_, gradients_;
  ModelWeights<Scalar> weights_, d_;

  std::vector<BlockRows> blocks_;
  Rows x_;                      // [n, hidden]           of the last block
  std::vector<int> tokens_;     // [n]
  std::vector<Index> counted_;  // [m]                   rows of x_ whose target counts
  std::vector<int> targets_;    // [m]                   and their targets
  Rows counted_x_, normed_;     // [m, hidden]           those rows, and their norm
  Rows logits_;                 // [<= head_rows, vocabulary]
  Eigen::Array<Scalar, Eigen::Dynamic, 1> log_sum_, loss_;  // [m]
  Eigen::Array<Index, Eigen::Dynamic, 1> correct_;          // [m]
  Rows dx_, dnormed_, dact_, dgate_, dup_;                  // gradients on their way back

  std::array<Index, 4> shape_{};  // B, T, 1, hidden of the last call
  bool kept_ = false;             // backward() can follow it
  md::Workspace workspace_;
};

}  // namespace examples
