/// \file
/// One pass through the layer and back, as layer.hpp describes it. W_x is the weight x_proj.
#pragma once

#include "momentum_delta/batch.hpp"
#include "momentum_delta/detail/activation_rows.hpp"
#include "momentum_delta/detail/product.hpp"
#include "momentum_delta/layer/gated_norm.hpp"
#include "momentum_delta/layer/saved.hpp"
#include "momentum_delta/layer/short_convolution.hpp"
#include "momentum_delta/normalize.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

template <class Scalar>
struct LayerPass {
  const LayerConfig& config;
  const LayerWeights<const Scalar>& weights;
  std::span<const Index> cu_seqlens;
  Executor* executor;
  Index B, T, N;
  bool together;  // the batches of every view follow each other, as rows of one matrix

  LayerRows<Scalar> values(LayerSaved<Scalar>& saved) const { return in(saved.values_); }
  LayerRows<Scalar> gradients(LayerSaved<Scalar>& saved) const { return in(saved.gradients_); }
  static Saved<Scalar>& rule(LayerSaved<Scalar>& saved) { return saved.rule_; }
  static void begin(LayerSaved<Scalar>& saved) { saved.filled_ = false; }
  void finish(LayerSaved<Scalar>& saved) const {
    saved.filled_ = true;
    saved.sizes_ = {B, T, N};
    saved.parameters_ = parameter_count(config);
  }
  void check_saved(const Check& check, LayerSaved<Scalar>& saved, const Options& options) const {
    if (!saved.filled_) check.fail("saved holds no forward pass");
    if (saved.sizes_ != std::array{B, T, N})
      check.fail("saved is of a forward pass with B, T, N = ", saved.sizes_[0], ", ", saved.sizes_[1], ", ",
                 saved.sizes_[2], ", not ", B, ", ", T, ", ", N);
    if (saved.parameters_ != parameter_count(config))
      check.fail("saved is of a layer of another configuration");
    const Sizes sizes = sizes_of(rule_inputs(values(saved)));
    if (options.chunk_size &&
        choose_chunk_size(options, sizes, Purpose::training) != saved.rule_.chunk_size())
      check.fail("options.rule.chunk_size = ", *options.chunk_size, ", but saved was made with ",
                 saved.rule_.chunk_size());
  }

  Inputs<Scalar> rule_inputs(const LayerRows<Scalar>& r) const {
    return {.q = r.tokens(r.q, r.HV, r.K),
            .k = r.tokens(r.k, r.HV, r.K),
            .v = r.tokens(r.v, r.HV, r.V),
            .p = r.tokens(r.p, r.HV, r.K),
            .log_alpha = r.gate(r.log_alpha),
            .log_mu = r.gate(r.log_mu),
            .beta = r.gate(r.beta),
            .eta = r.gate(r.eta),
            .cu_seqlens = cu_seqlens};
  }

  // y from x. run_rule(inputs, o) is the rule, and where its state is; the tails of `cache`, if any, are read
  // and moved on.
  template <class RunRule>
  void forward(const TokenView<const Scalar>& x, const LayerRows<Scalar>& r, LayerCache<Scalar>* cache,
               const RunRule& run_rule, const TokenView<Scalar>& y) const {
    // 1. Projections.
    project(x, weights.q_proj, r.q_in, r.HK * r.K);
    project(x, weights.k_proj, r.k_in, r.HK * r.K);
    project(x, weights.v_proj, r.v_in, r.HV * r.V);
    project(x, weights.g_proj, r.g, r.HV * r.V);
    project(x, weights.a_proj, r.a, r.HV);
    project(x, weights.b_proj, r.b, r.HV);
    project(x, weights.m_proj, r.m, r.HV);
    project(x, weights.e_proj, r.e, r.HV);
    r.rows(r.e, r.HV) /= tau();
    check_gates<Scalar>(Check("layer_forward"), raw_gates(r), gate_parameters(weights), config.gates);

    // 2. Short convolutions.
    if (config.use_short_conv) {
      read_tail(cache ? &cache->q_tail : nullptr, r.q_tail, r.HK * r.K);
      read_tail(cache ? &cache->k_tail : nullptr, r.k_tail, r.HK * r.K);
      read_tail(cache ? &cache->v_tail : nullptr, r.v_tail, r.HV * r.V);
      convolve(r.q_in, r.q_tail, weights.q_conv1d, r.q_conv, r.HK * r.K);
      convolve(r.k_in, r.k_tail, weights.k_conv1d, r.k_conv, r.HK * r.K);
      convolve(r.v_in, r.v_tail, weights.v_conv1d, r.v_conv, r.HV * r.V);
    }

    // 3. For each head: SiLU, output correction, unit length, gates, p = alpha k.
    for_each_index(executor, r.HK, [&](Index h) {
      silu(r.head(r.q_conv, r.HK, r.K, h), r.head(r.q_act, r.HK, r.K, h));
      silu(r.head(r.k_conv, r.HK, r.K, h), r.head(r.k_act, r.HK, r.K, h));
    });
    for_each_index(executor, r.HV, [&](Index h) {
      silu(r.head(r.v_conv, r.HV, r.V, h), r.head(r.v, r.HV, r.V, h));
      const Index key_head = h / (r.HV / r.HK);
      auto q_each = r.head(r.q_each, r.HV, r.K, h), k_each = r.head(r.k_each, r.HV, r.K, h);
      k_each = r.head(r.k_act, r.HK, r.K, key_head);
      q_each = r.head(r.q_act, r.HK, r.K, key_head) - correction(h) * k_each;
      l2_normalize<Scalar>(r.head_tokens(r.q_each, h), r.head_tokens(r.q, h));
      l2_normalize<Scalar>(r.head_tokens(r.k_each, h), r.head_tokens(r.k, h));
      gates_of_head<Scalar>(raw_gates(r), gate_parameters(weights), gates(r), config.gates, h);
      decay_keys<Scalar>(r.head_tokens(r.k, h), r.head_gate(r.log_alpha, h), r.head_tokens(r.p, h));
    });

    // 4. The rule.
    run_rule(rule_inputs(r), r.tokens(r.o, r.HV, r.V));
    if (cache && config.use_short_conv) {
      move_tails(r.q_in, cache->q_tail, r.HK * r.K);
      move_tails(r.k_in, cache->k_tail, r.HK * r.K);
      move_tails(r.v_in, cache->v_tail, r.HV * r.V);
    }

    // 5. Gated norm and output projection.
    for_each_index(executor, r.HV, [&](Index h) {
      gated_norm<Scalar>(r.head(r.o, r.HV, r.V, h), r.head(r.g, r.HV, r.V, h), weights.o_norm, config.gate,
                         config.norm_eps, r.head(r.normed, r.HV, r.V, h));
    });
    for (Index i = 0; i < blocks(); ++i)
      product(executor, block(y, i), factor(block(r.rows(r.normed, r.HV * r.V), i)),
              factor(matrix(weights.o_proj, config.hidden_size), transposed));
  }

  // Gradients from dy, the passes above in reverse; d are those of the rows r. run_rule(inputs, output
  // gradients, input gradients) is the rule's. All of dweights is assigned or added to; so is dx, if present.
  template <class RunRule>
  void backward(const TokenView<const Scalar>& x, const LayerRows<Scalar>& r,
                const TokenView<const Scalar>& dy, const LayerRows<Scalar>& d, const RunRule& run_rule,
                const TokenView<Scalar>& dx, const LayerWeights<Scalar>& dw, bool accumulate) const {
    // 5. y = normed W_o^T
    for (Index i = 0; i < blocks(); ++i) {
      product(executor, block(d.rows(d.normed, r.HV * r.V), i), factor(block(dy, i)),
              factor(matrix(weights.o_proj, config.hidden_size)));
      product(executor, matrix(dw.o_proj, config.hidden_size), factor(block(dy, i), transposed),
              factor(block(r.rows(r.normed, r.HV * r.V), i)), accumulate || i > 0);
    }
    //    normed = r o w act(g)
    Matrix<Scalar> do_norm = Matrix<Scalar>::Zero(r.HV, r.V);
    for_each_index(executor, r.HV, [&](Index h) {
      gated_norm_backward<Scalar>(r.head(r.o, r.HV, r.V, h), r.head(r.g, r.HV, r.V, h), weights.o_norm,
                                  config.gate, config.norm_eps, d.head(d.normed, r.HV, r.V, h),
                                  d.head(d.o, r.HV, r.V, h), d.head(d.g, r.HV, r.V, h), do_norm.row(h));
    });
    add(dw.o_norm, do_norm.colwise().sum(), accumulate);

    // 4. The rule.
    run_rule(rule_inputs(r), {.do_ = d.tokens(d.o, d.HV, d.V)},
             {.dq = d.tokens(d.q, d.HV, d.K),
              .dk = d.tokens(d.k, d.HV, d.K),
              .dv = d.tokens(d.v, d.HV, d.V),
              .dp = d.tokens(d.p, d.HV, d.K),
              .dlog_alpha = d.gate(d.log_alpha),
              .dlog_mu = d.gate(d.log_mu),
              .dbeta = d.gate(d.beta),
              .deta = d.gate(d.eta)});

    // 3. p = alpha k, gates, unit length, SiLU of v
    for_each_index(executor, r.HV, [&](Index h) {
      decay_keys_backward<Scalar>(r.head_tokens(r.k, h), r.head_gate(r.log_alpha, h), d.head_tokens(d.p, h),
                                  d.head_tokens(d.k, h), d.head_gate(d.log_alpha, h), /*accumulate=*/true);
      gates_backward_of_head<Scalar>(raw_gates(r), gate_parameters(weights), gates(d), raw_gates(d),
                                     gate_parameters(dw), config.gates, accumulate, h);
      l2_normalize_backward<Scalar>(r.head_tokens(r.q_each, h), d.head_tokens(d.q, h),
                                    d.head_tokens(d.q_each, h));
      l2_normalize_backward<Scalar>(r.head_tokens(r.k_each, h), d.head_tokens(d.k, h),
                                    d.head_tokens(d.k_each, h));
      silu_backward(r.head(r.v_conv, r.HV, r.V, h), d.head(d.v, r.HV, r.V, h),
                    d.head(d.v_conv, r.HV, r.V, h));
    });
    //    q_each = q_act - D k_each, k_each = k_act: sums over the value heads that share a key head
    for_each_index(executor, r.HK, [&](Index key_head) {
      auto dq_act = d.head(d.q_act, r.HK, r.K, key_head), dk_act = d.head(d.k_act, r.HK, r.K, key_head);
      const Index group = r.HV / r.HK;
      for (Index h = key_head * group; h < (key_head + 1) * group; ++h) {
        const auto dq_each = d.head(d.q_each, r.HV, r.K, h), dk_each = d.head(d.k_each, r.HV, r.K, h);
        if (h == key_head * group)
          dq_act = dq_each, dk_act = dk_each;
        else
          dq_act += dq_each, dk_act += dk_each;
        if (!config.use_output_correction) continue;
        dk_act -= correction(h) * dq_each;
        const Scalar dD_log = -correction(h) * dq_each.cwiseProduct(r.head(r.k_each, r.HV, r.K, h)).sum();
        Scalar& to = dw.D_log[std::size_t(h)];
        to = accumulate ? to + dD_log : dD_log;
      }
      silu_backward(r.head(r.q_conv, r.HK, r.K, key_head), dq_act, d.head(d.q_conv, r.HK, r.K, key_head));
      silu_backward(r.head(r.k_conv, r.HK, r.K, key_head), dk_act, d.head(d.k_conv, r.HK, r.K, key_head));
    });

    // 2. Short convolutions.
    if (config.use_short_conv) {
      convolve_backward(r.q_in, r.q_tail, weights.q_conv1d, d.q_conv, d.q_in, dw.q_conv1d, r.HK * r.K,
                        accumulate);
      convolve_backward(r.k_in, r.k_tail, weights.k_conv1d, d.k_conv, d.k_in, dw.k_conv1d, r.HK * r.K,
                        accumulate);
      convolve_backward(r.v_in, r.v_tail, weights.v_conv1d, d.v_conv, d.v_in, dw.v_conv1d, r.HV * r.V,
                        accumulate);
    }

    // 1. Projections.
    d.rows(d.e, d.HV) /= tau();
    bool add_dx = accumulate;
    const auto project_backward = [&](std::span<const Scalar> w, Scalar* dout, Index width,
                                      std::span<Scalar> dw_out) {
      for (Index i = 0; i < blocks(); ++i) {
        const auto dout_rows = block(d.rows(dout, width), i);
        product(executor, matrix(dw_out, width), factor(dout_rows, transposed), factor(block(x, i)),
                accumulate || i > 0);
        if (!dx.absent())
          product(executor, block(dx, i), factor(dout_rows), factor(matrix(w, width)), add_dx);
      }
      add_dx = true;
    };
    project_backward(weights.q_proj, d.q_in, r.HK * r.K, dw.q_proj);
    project_backward(weights.k_proj, d.k_in, r.HK * r.K, dw.k_proj);
    project_backward(weights.v_proj, d.v_in, r.HV * r.V, dw.v_proj);
    project_backward(weights.g_proj, d.g, r.HV * r.V, dw.g_proj);
    project_backward(weights.a_proj, d.a, r.HV, dw.a_proj);
    project_backward(weights.b_proj, d.b, r.HV, dw.b_proj);
    project_backward(weights.m_proj, d.m, r.HV, dw.m_proj);
    project_backward(weights.e_proj, d.e, r.HV, dw.e_proj);
  }

 private:
  static constexpr bool transposed = true;

  LayerRows<Scalar> in(Memory& memory) const {
    Arena need;
    (void)LayerRows<Scalar>(need, config, B, T, N);
    Arena arena(memory.reserve(need.used()));
    return LayerRows<Scalar>(arena, config, B, T, N);
  }

  // The tokens as matrices: all of them, or one for each batch.
  Index blocks() const { return together ? 1 : B; }
  template <class S>
  RowsMap<S> block(const TokenView<S>& x, Index i) const {
    return {x.data + i * x.stride[0], together ? B * T : T, x.shape[3], Eigen::OuterStride<>(x.stride[1])};
  }
  RowsMap<Scalar> block(RowsMap<Scalar> rows, Index i) const {
    const Index stride = rows.outerStride();
    return {rows.data() + i * T * stride, together ? B * T : T, rows.cols(), Eigen::OuterStride<>(stride)};
  }

  // A weight of `rows` rows.
  template <class S>
  static RowsMap<S> matrix(std::span<S> w, Index rows) {
    const Index cols = Index(w.size()) / rows;
    return {w.data(), rows, cols, Eigen::OuterStride<>(cols)};
  }
  template <class Sum>
  static void add(std::span<Scalar> to, const Sum& sum, bool accumulate) {
    Eigen::Map<RowVector<Scalar>> row(to.data(), Index(to.size()));
    if (accumulate)
      row += sum;
    else
      row = sum;
  }

  // out = x W^T; out: [n, width].
  void project(const TokenView<const Scalar>& x, std::span<const Scalar> w, Scalar* out, Index width) const {
    const RowsMap<Scalar> rows(out, B * T, width, Eigen::OuterStride<>(width));
    for (Index i = 0; i < blocks(); ++i)
      product(executor, block(rows, i), factor(block(x, i)), factor(matrix(w, width), transposed));
  }

  Scalar tau() const { return Scalar(std::sqrt(double(config.hidden_size) / config.tau_factor)); }
  Scalar correction(Index h) const {
    return config.use_output_correction ? std::exp(weights.D_log[std::size_t(h)]) : Scalar(0);
  }
  static RawGates<Scalar> raw_gates(const LayerRows<Scalar>& r) {
    return {r.gate(r.a), r.gate(r.b), r.gate(r.m), r.gate(r.e)};
  }
  static Gates<Scalar> gates(const LayerRows<Scalar>& r) {
    return {r.gate(r.log_alpha), r.gate(r.log_mu), r.gate(r.beta), r.gate(r.eta)};
  }

  static void silu(const RowsMap<Scalar>& x, RowsMap<Scalar> y) {
    y.array() = x.array() * sigmoid_of(x.array());
  }
  // dx = dy s (1 + x (1 - s)), s = sigmoid(x)
  static void silu_backward(const RowsMap<Scalar>& x, const RowsMap<Scalar>& dy, RowsMap<Scalar> dx) {
    dx.array() = sigmoid_of(x.array());
    dx.array() = dy.array() * dx.array() * (1 + x.array() * (1 - dx.array()));
  }

  void read_tail(const std::vector<Scalar>* from, Scalar* to, Index width) const {
    const Index count = N * config.tail_rows() * width;
    if (from)
      std::copy_n(from->data(), count, to);
    else
      std::fill_n(to, count, Scalar(0));
  }

  // visit(n, first row, rows) for the tokens of each sequence.
  template <class Visit>
  void for_each_sequence(const Visit& visit) const {
    for (Index n = 0; n < N; ++n) {
      const std::size_t i = std::size_t(n);
      if (cu_seqlens.empty())
        visit(n, n * T, T);
      else
        visit(n, cu_seqlens[i], cu_seqlens[i + 1] - cu_seqlens[i]);
    }
  }
  // Channels are tasks.
  template <class Visit>
  void for_each_channels(Index width, const Visit& visit) const {
    constexpr Index size = 64;
    for_each_index(executor, (width + size - 1) / size,
                   [&](Index i) { visit(i * size, std::min(size, width - i * size)); });
  }
  Matrix<Scalar> taps(std::span<const Scalar> w, Index channel, Index channels) const {  // W x channels
    return matrix(
               w.subspan(std::size_t(channel * config.conv_size), std::size_t(channels * config.conv_size)),
               channels)
        .transpose();
  }
  // `count` rows from `row` on, the given channels, of a matrix `width` wide. Without rows there may be no
  // memory to step over.
  template <class S>
  static RowsMap<S> part(S* x, Index width, Index row, Index count, Index channel, Index channels) {
    S* const from = count == 0 ? x : x + row * width + channel;
    return {from, count, channels, Eigen::OuterStride<>(width)};
  }

  void convolve(const Scalar* x, const Scalar* tail, std::span<const Scalar> w, Scalar* y,
                Index width) const {
    const Index rows = config.tail_rows();
    for_each_channels(width, [&](Index c, Index channels) {
      const Matrix<Scalar> t = taps(w, c, channels);
      for_each_sequence([&](Index n, Index begin, Index count) {
        short_convolution<Scalar>(part(x, width, begin, count, c, channels),
                                  part(tail, width, n * rows, rows, c, channels), t,
                                  part(y, width, begin, count, c, channels));
      });
    });
  }
  void convolve_backward(const Scalar* x, const Scalar* tail, std::span<const Scalar> w, const Scalar* dy,
                         Scalar* dx, std::span<Scalar> dw, Index width, bool accumulate) const {
    const Index rows = config.tail_rows();
    for_each_channels(width, [&](Index c, Index channels) {
      const Matrix<Scalar> t = taps(w, c, channels);
      Matrix<Scalar> dt = Matrix<Scalar>::Zero(config.conv_size, channels);
      for_each_sequence([&](Index n, Index begin, Index count) {
        short_convolution_backward<Scalar>(
            part(x, width, begin, count, c, channels), part(tail, width, n * rows, rows, c, channels), t,
            part(dy, width, begin, count, c, channels), part(dx, width, begin, count, c, channels), dt);
      });
      auto to = matrix(dw, width).middleRows(c, channels);
      if (accumulate)
        to += dt.transpose();
      else
        to = dt.transpose();
    });
  }
  void move_tails(const Scalar* x, std::vector<Scalar>& tail, Index width) const {
    const Index rows = config.tail_rows();
    for_each_sequence([&](Index n, Index begin, Index count) {
      move_tail<Scalar>(part(x, width, begin, count, 0, width),
                        part(tail.data(), width, n * rows, rows, 0, width));
    });
  }
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
