// Matrices of Scalar, and loops over their rows and products of them cut into tasks for an Executor. The cuts
// depend on the sizes alone, so the results are the same bits for every number of threads.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <momentum_delta/executor.hpp>
#include <span>
#include <vector>

namespace examples {

using momentum_delta::Executor;
using momentum_delta::Index;

template <class Scalar>
using Matrix = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Aligned as Eigen's own matrices are. Where an array begins within a register decides which elements Eigen
// computes singly and which in packets, and so how they are rounded: in these, a computation done twice gives
// the same bits wherever the memory lies.
template <class Scalar>
using Vector = std::vector<Scalar, Eigen::aligned_allocator<Scalar>>;

// A weight or its gradient as a matrix of `rows` rows.
template <class Scalar>
auto matrix(std::span<Scalar> w, Index rows) {
  return Eigen::Map<Matrix<Scalar>>(w.data(), rows, Index(w.size()) / rows);
}
template <class Scalar>
auto matrix(std::span<const Scalar> w, Index rows) {
  return Eigen::Map<const Matrix<Scalar>>(w.data(), rows, Index(w.size()) / rows);
}

inline constexpr Index task_rows = 64;
inline Index task_count(Index rows) {
  return (rows + task_rows - 1) / task_rows;
}

// f(begin, count) for blocks of consecutive rows that make up all of them; executor null: one after another.
template <class F>
void for_each_rows(Executor* executor, Index rows, const F& f) {
  const auto task = [&](Index i, int) { f(i * task_rows, std::min(task_rows, rows - i * task_rows)); };
  momentum_delta::SerialExecutor serial;
  (executor ? *executor : serial).run(task_count(rows), task);
}

// to = a b
template <class To, class A, class B>
void multiply(Executor* executor, To&& to, const A& a, const B& b) {
  for_each_rows(executor, to.rows(), [&](Index begin, Index count) {
    to.middleRows(begin, count).noalias() = a.middleRows(begin, count) * b;
  });
}

// to += a b
template <class To, class A, class B>
void multiply_add(Executor* executor, To&& to, const A& a, const B& b) {
  for_each_rows(executor, to.rows(), [&](Index begin, Index count) {
    to.middleRows(begin, count).noalias() += a.middleRows(begin, count) * b;
  });
}

}  // namespace examples
