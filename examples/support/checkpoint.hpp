// A training run in a .safetensors file: resumed from it, the run goes on bit for bit as if it had never
// stopped. The model's parameters have their names; the optimizer's moments those names after "optimizer.m."
// and "optimizer.v.".
#pragma once

#include <charconv>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "chart.hpp"
#include "model.hpp"
#include "optimizer.hpp"
#include "safetensors.hpp"

namespace examples {

// What there is to a run besides its model and optimizer.
struct RunState {
  Index step = 0;                   // the next one
  std::uint64_t data_position = 0;  // of the random numbers that choose the data, whose seed is a setting
  std::vector<Series> curves{};     // recorded so far

  // What must be the same when it is resumed, as text: "steps" -> "1000".
  std::map<std::string, std::string> settings{};
};

namespace detail {

// visit(name, shape, values) for every tensor of a run whose shape the model says.
template <class Scalar, class Visit>
void for_each_tensor(Model<Scalar>& model, AdamW<Scalar>& optimizer, const Visit& visit) {
  std::size_t at = 0;
  model.for_each_parameter(
      [&](const std::string& name, const md::WeightShape& shape, std::span<Scalar> w, bool) {
        const std::vector<Index> sizes(shape.dimensions().begin(), shape.dimensions().end());
        visit(name, sizes, w);
        visit("optimizer.m." + name, sizes, std::span(optimizer.m).subspan(at, w.size()));
        visit("optimizer.v." + name, sizes, std::span(optimizer.v).subspan(at, w.size()));
        at += w.size();
      });
}

}  // namespace detail

// Throws std::runtime_error if the file cannot be written; see safetensors::write.
template <class Scalar>
void save_checkpoint(const std::string& path, Model<Scalar>& model, AdamW<Scalar>& optimizer,
                     const RunState& state) {
  safetensors::File file;
  detail::for_each_tensor(
      model, optimizer,
      [&](const std::string& name, const std::vector<Index>& shape, std::span<const Scalar> values) {
        file.tensors.emplace(name, safetensors::Tensor::of({shape.begin(), shape.end()}, values));
      });
  for (const Series& curve : state.curves) {  // its points, x and y
    std::vector<double> values = curve.x;
    values.insert(values.end(), curve.y.begin(), curve.y.end());
    file.tensors.emplace("curve." + curve.name,
                         safetensors::Tensor::of<double>({2, Index(curve.x.size())}, values));
  }
  file.metadata = {{"step", std::to_string(state.step)},
                   {"optimizer_steps", std::to_string(optimizer.steps)},
                   {"data_position", std::to_string(state.data_position)}};
  for (const auto& [name, value] : state.settings) file.metadata["setting." + name] = value;
  safetensors::write(path, file);
}

// Assigns model, optimizer and state: state.curves have the names, and state.settings are those, of the run
// that was saved. Throws std::runtime_error, before anything is assigned, if the file does not fit, naming
// everything that is missing or different.
template <class Scalar>
void load_checkpoint(const safetensors::File& file, Model<Scalar>& model, AdamW<Scalar>& optimizer,
                     RunState& state) {
  std::string problems;
  const auto number = [&](const std::string& name, auto& value) {
    const auto found = file.metadata.find(name);
    if (found == file.metadata.end()) {
      problems += "\n  " + name + " is missing";
      return;
    }
    const char* const end = found->second.data() + found->second.size();
    const auto [rest, error] = std::from_chars(found->second.data(), end, value);
    if (error != std::errc() || rest != end) problems += "\n  " + name + " is no number: " + found->second;
  };
  RunState loaded = state;
  std::int64_t optimizer_steps = 0;
  number("step", loaded.step);
  number("optimizer_steps", optimizer_steps);
  number("data_position", loaded.data_position);
  for (const auto& [name, value] : state.settings) {
    const auto found = file.metadata.find("setting." + name);
    const std::string saved = found == file.metadata.end() ? "missing" : found->second;
    if (saved != value) problems += "\n  " + name + " is " + saved + ", not " + value;
  }

  std::vector<std::vector<Scalar>> values;
  const auto read = [&](const std::string& name, const std::vector<Index>& shape, std::span<Scalar>) {
    const auto found = file.tensors.find(name);
    if (found == file.tensors.end())
      problems += "\n  " + name + " is missing";
    else if (!std::equal(shape.begin(), shape.end(), found->second.shape.begin(), found->second.shape.end()))
      problems += "\n  " + name + " has another shape than the model's";
    else if (found->second.dtype != (sizeof(Scalar) == 4 ? "F32" : "F64"))
      problems += "\n  " + name + " has dtype " + found->second.dtype;
    else
      values.push_back(found->second.template as<Scalar>());
  };
  detail::for_each_tensor(model, optimizer, read);
  for (Series& curve : loaded.curves) {
    const auto found = file.tensors.find("curve." + curve.name);
    if (found == file.tensors.end() || found->second.shape.size() != 2 || found->second.shape[0] != 2 ||
        found->second.dtype != "F64") {
      problems += "\n  curve." + curve.name + " is missing or not [2, points] in F64";
      continue;
    }
    const std::vector<double> points = found->second.template as<double>();
    const auto middle = points.begin() + found->second.shape[1];
    curve.x.assign(points.begin(), middle);
    curve.y.assign(middle, points.end());
  }
  if (!problems.empty()) throw std::runtime_error("does not fit:" + problems);

  std::size_t next = 0;
  const auto assign = [&](const std::string&, const std::vector<Index>&, std::span<Scalar> to) {
    std::copy(values[next].begin(), values[next].end(), to.begin());
    ++next;
  };
  detail::for_each_tensor(model, optimizer, assign);
  optimizer.steps = optimizer_steps;
  state = std::move(loaded);
}

// Also throws if the file cannot be read.
template <class Scalar>
void load_checkpoint(const std::string& path, Model<Scalar>& model, AdamW<Scalar>& optimizer,
                     RunState& state) {
  load_checkpoint(safetensors::read(path), model, optimizer, state);
}

}  // namespace examples
