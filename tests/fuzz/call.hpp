// What the calls of the rule and of the selective scan have in common.
#pragma once

#include <sstream>
#include <type_traits>

#include "../support/problem.hpp"
#include "buffer.hpp"
#include "bytes.hpp"

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

// What is checked alike of a call of either rule. A Target has the call's choices c_, and
// for_each(visit(name, buffer, is it written to)), for_each_gradient(visit(name, buffer, member)), backward().
template <class Target>
class Checks {
 protected:
  explicit Checks(Sabotage sabotage) : sabotage_(sabotage) {}

  void remember() {
    self().for_each([](const char*, auto& buffer, bool) { buffer.remember(); });
  }
  void check_memory() {
    self().for_each([&](const std::string& name, auto& buffer, bool written) {
      if (!(written ? buffer.gaps_unchanged() : buffer.unchanged()))
        violated("what lies " + std::string(written ? "between the elements of " : "in ") + name +
                 " is changed");
    });
  }
  // Every element is that of the plain call, rounded once.
  template <class T, std::size_t Rank, class Scalar>
  void same(const char* name, Buffer<T, Rank>& x, const Array<Scalar>& plain) {
    if (!x.present() || sabotage_ == Sabotage::result || sabotage_ == Sabotage::gradient) return;
    x.for_each([&](std::size_t i, const T& value) {
      const T expected = static_cast<T>(plain.values[i]);
      if (std::memcmp(&value, &expected, sizeof(T)) != 0) {
        std::ostringstream text;
        text << name << "[" << i << "] is " << value << ", not " << expected;
        violated(text.str());
      }
    });
  }
  // backward() gives the gradients of the plain call, added to what is there if that was chosen.
  template <class Gradients>
  void check_gradients(const Gradients& plain) {
    Gradients expected = plain;
    self().for_each_gradient([&](const char*, auto& buffer, auto member) {
      if (!self().c_.accumulate || !buffer.present()) return;
      auto& values = (expected.*member).values;
      const auto start = buffer.template get<std::decay_t<decltype(values[0])>>();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] += start.values[i];
    });
    remember();
    self().backward();
    check_memory();
    self().for_each_gradient(
        [&](const char* name, auto& buffer, auto member) { same(name, buffer, expected.*member); });
  }
  // The call throws, naming the function, and writes nothing.
  template <class F>
  void refused(const std::string& function, const F& call) {
    remember();
    std::string message = "accepted";
    try {
      if (sabotage_ != Sabotage::accepted) call();
    } catch (const std::invalid_argument& e) {
      message = e.what();
    }
    if (sabotage_ == Sabotage::message) message = "momentum_delta: " + message;
    if (!message.starts_with("momentum_delta::" + function + ": ")) violated("an illegal call: " + message);
    self().for_each([&](const std::string& name, auto& buffer, bool written) {
      if (sabotage_ == Sabotage::written && written && buffer.present()) buffer.memory.back() = {};
      if (!buffer.unchanged()) violated("a refused call wrote to " + name);
    });
  }

  Sabotage sabotage_;

 private:
  Target& self() { return static_cast<Target&>(*this); }
  [[noreturn]] void violated(const std::string& message) { fail(self().c_, message); }
};

// check(Target<Scalar, Storage>) for the type that was chosen. Throws Failure if a legal call is refused; counts
// what was reached.
template <template <class, class> class Target, class Choices, class Names>
void check_call(const Choices& call, const Names& illegal_names, Reached* reached, Sabotage sabotage) {
  bool illegal = false;
  try {
    if (call.type == Type::float32) illegal = Target<float, float>(call, sabotage).check();
    if (call.type == Type::float64) illegal = Target<double, double>(call, sabotage).check();
    if (call.type == Type::bfloat16) illegal = Target<float, Eigen::bfloat16>(call, sabotage).check();
    if (call.type == Type::half) illegal = Target<float, Eigen::half>(call, sabotage).check();
  } catch (const std::invalid_argument& e) {
    fail(call, std::string("a legal call is refused: ") + e.what());
  }
  if (reached == nullptr) return;
  if (illegal)
    ++(*reached)[std::string("illegal: ") + illegal_names[call.illegal]];
  else
    call.for_each_class(
        [&](const std::string& what, const std::string& which) { ++(*reached)[what + " " + which]; });
}

}  // namespace fuzz
