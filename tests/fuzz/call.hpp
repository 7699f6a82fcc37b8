// What the calls of the rule and of the selective scan have in common.
#pragma once

#include "../support/problem.hpp"
#include "buffer.hpp"

namespace fuzz {

using momentum_delta::Algorithm;
using test::Random;

// The order is that of the names.
enum class Kind { forward, training, step };
enum class Type { float32, float64, bfloat16, half };
enum class Final { apart, in_place, absent };

inline constexpr const char* kind_names[] = {"forward", "training", "step"};
inline constexpr const char* type_names[] = {"float", "double", "bfloat16", "half"};
inline constexpr const char* algorithm_names[] = {"automatic", "recurrent", "chunk"};
inline constexpr const char* final_names[] = {"apart", "in place", "absent"};

// A wrong library, to see that the checks notice: what a call did is spoilt after it.
enum class Sabotage { none, value, gap, input, result, gradient, accepted, message, written };

// Executors and the workspace outlive calls, as they would in use.
inline momentum_delta::Executor* executor(int threads) {
  static momentum_delta::ThreadPool one(1), two(2), three(3);
  momentum_delta::Executor* const pools[] = {nullptr, &one, &two, &three};
  return pools[threads];
}
inline momentum_delta::Workspace* workspace() {
  static momentum_delta::Workspace workspace;
  return &workspace;
}

inline long double rms(const Array<long double>& x) {
  long double sum = 0;
  for (const long double value : x.values) sum += value * value;
  return std::sqrt(sum / std::max<long double>(1, x.values.size()));
}
template <class Scalar>
Array<long double> difference(const Array<Scalar>& x, const Array<long double>& exact) {
  Array<long double> d{exact.shape, {}};
  for (std::size_t i = 0; i < exact.values.size(); ++i) d.values.push_back(x.values[i] - exact.values[i]);
  return d;
}

// Spoil a view, if there is one.
template <class View>
bool lengthen(View& view, std::size_t d) {
  if (view.absent()) return false;
  ++view.shape[d];
  return true;
}
template <class View, class T>
bool move(View& view, T* to) {
  if (view.empty()) return false;
  view.data = const_cast<std::remove_const_t<T>*>(to);
  return true;
}

}  // namespace fuzz
