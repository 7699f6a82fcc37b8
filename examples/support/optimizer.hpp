// What turns gradients into a step: clipping, learning rate, AdamW. All over flat arrays.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <stdexcept>
#include <type_traits>

#include "product.hpp"

namespace examples {

// Scales the gradients so that their norm is at most max_norm, and returns the norm that they had. Throws
// std::runtime_error if it is not finite: no step of any length is then right.
template <class Scalar>
double clip_norm(std::span<Scalar> gradients, double max_norm) {
  Eigen::Map<Eigen::Array<Scalar, Eigen::Dynamic, 1>> g(gradients.data(), Eigen::Index(gradients.size()));
  const double norm = std::sqrt(g.template cast<double>().square().sum());
  if (!std::isfinite(norm)) throw std::runtime_error("the gradient is not finite");
  if (norm > max_norm) g *= Scalar(max_norm / norm);
  return norm;
}

// Up to `peak` in `warmup` steps, then down half a cosine to `floor` at step `steps`. The first step is 0,
// and its rate peak / warmup.
struct CosineSchedule {
  double peak, floor;
  std::int64_t warmup, steps;

  double rate(std::int64_t step) const {
    if (step < warmup) return peak * double(step + 1) / double(warmup);
    if (step >= steps) return floor;
    const double done = double(step - warmup) / double(steps - warmup);
    return floor + (peak - floor) / 2 * (1 + std::cos(std::numbers::pi * done));
  }
};

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1;
};

// With gradients g, step number n = 1, 2, .. and d = 1 where weight decay applies, else 0:
//   m = beta1 m + (1 - beta1) g     v = beta2 v + (1 - beta2) g^2
//   w = w - rate (m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + epsilon) + weight_decay d w)
// (Loshchilov and Hutter 2019.)
template <class Scalar>
class AdamW {
 public:
  explicit AdamW(Vector<Scalar> decays, const AdamWOptions& options = {})
      : m(decays.size()), v(decays.size()), options_(options), decays_(std::move(decays)) {}

  // Throws std::invalid_argument unless there are as many weights and gradients as there were `decays`.
  void step(std::span<Scalar> weights, std::span<const Scalar> gradients, double rate) {
    if (weights.size() != decays_.size() || gradients.size() != decays_.size())
      throw std::invalid_argument("AdamW: wrong number of weights or gradients");
    ++steps;
    const auto [beta1, beta2, epsilon, weight_decay] = options_;
    const Scalar m_scale = Scalar(1 / (1 - std::pow(beta1, double(steps))));
    const Scalar v_scale = Scalar(1 / (1 - std::pow(beta2, double(steps))));
    const auto array = [](auto& values) {
      using Array = Eigen::Array<Scalar, Eigen::Dynamic, 1>;
      using Value = std::remove_reference_t<decltype(*values.data())>;
      return Eigen::Map<std::conditional_t<std::is_const_v<Value>, const Array, Array>>(
          values.data(), Eigen::Index(values.size()));
    };
    const auto g = array(gradients);
    auto w = array(weights), m_ = array(m), v_ = array(v);
    m_ = Scalar(beta1) * m_ + Scalar(1 - beta1) * g;
    v_ = Scalar(beta2) * v_ + Scalar(1 - beta2) * g.square();
    w -= Scalar(rate) * (m_scale * m_ / ((v_scale * v_).sqrt() + Scalar(epsilon)) +
                         Scalar(weight_decay) * array(decays_) * w);
  }

  std::int64_t steps = 0;  // made so far
  Vector<Scalar> m, v;     // running means of the gradients and of their squares

 private:
  AdamWOptions options_;
  Vector<Scalar> decays_;
};

// For AdamW: 1 for every parameter of the model that weight decay is for, else 0.
template <class Model>
auto decays(Model& model) {
  Vector<std::remove_cvref_t<decltype(model.parameters()[0])>> out;
  out.reserve(model.parameters().size());
  model.for_each_parameter(
      [&](const auto&, const auto&, auto w, bool decay) { out.insert(out.end(), w.size(), decay ? 1 : 0); });
  return out;
}

}  // namespace examples
