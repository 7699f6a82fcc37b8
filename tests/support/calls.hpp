// Every public call in the circumstances that a test makes: where its tensors lie, what its outputs and its
// workspace held before. Compiled once, in calls_*.cpp.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "problem.hpp"
#include "scan.hpp"

namespace test {

class Circumstances {
 public:
  Circumstances() = default;
  virtual ~Circumstances() = default;
  Circumstances(const Circumstances&) = delete;
  Circumstances& operator=(const Circumstances&) = delete;

  // Memory for a tensor, until the circumstances end. stride: contiguous, in elements; all but the last may
  // be changed. Here: the heap.
  virtual std::byte* place(std::size_t element, std::span<const Index> shape, std::span<Index> stride);
  // Makes the call, once, and may lend it a workspace.
  virtual void make(const std::string& name, const std::function<void(momentum_delta::Workspace*)>& call);
  // What the outputs hold before the call.
  virtual double before() const { return std::numeric_limits<double>::quiet_NaN(); }

 private:
  std::vector<momentum_delta::detail::Memory> heap_;
};

// What the calls gave, by the names of call and tensor.
using Given = std::map<std::string, std::vector<std::byte>>;

// What is not the same in both; empty if all is.
std::string difference(const Given& a, const Given& b);

// forward() in every form, with and without a Saved; backward() in both, assigned and added; step() over the
// first token. Tokens are stored in Storage.
template <class Scalar, class Storage>
Given rule_calls(const Problem<double>& x, const Upstream<double>& dy, Index chunk_size, Circumstances& c);
// scan_forward(), scan_backward() and scan_step() alike.
template <class Scalar, class Storage>
Given scan_calls(const ScanProblem<double>& x, const ScanUpstream<double>& dy, Index chunk_size,
                 Circumstances& c);
// l2_normalize(), decay_keys(), gates() and negative_exp(), and their gradients. Of s, V is not used.
template <class Scalar>
Given parameter_calls(const Shape& s, Circumstances& c);
// layer_forward() with and without a LayerSaved or a LayerCache, layer_step() and layer_backward().
template <class Scalar>
Given layer_calls(const momentum_delta::LayerConfig& config, Index B, Index T, Circumstances& c);

}  // namespace test
