/// \file
/// Who runs the independent tasks of a call: SerialExecutor, ThreadPool, OpenMPExecutor, or an Executor of
/// the caller's own.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstdint>
#include <exception>
#include <memory>
#include <stop_token>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "momentum_delta/check.hpp"
#include "momentum_delta/types.hpp"

namespace momentum_delta {

/// Refers to a callable object, void(Index task, int worker), that must outlive it. Copies refer to the same
/// object, and calls reach it as an lvalue, from several threads at once.
class TaskRef {
 public:
  /// task: an object, called as task(Index, int); its result is ignored. A function is no object: use a
  /// lambda.
  template <class Task>
  requires(!std::same_as<std::remove_cvref_t<Task>, TaskRef> &&
           std::is_object_v<std::remove_reference_t<Task>> &&
           std::is_invocable_v<std::remove_reference_t<Task>&, Index, int>) TaskRef(Task&& task)
      : object_(const_cast<void*>(static_cast<const volatile void*>(std::addressof(task)))),
        call_([](void* object, Index i, int worker) {
          static_cast<void>((*static_cast<std::remove_reference_t<Task>*>(object))(i, worker));
        }) {}

  /// Calls the object.
  void operator()(Index task, int worker) const { call_(object_, task, worker); }

 private:
  void* object_;
  void (*call_)(void*, Index, int);
};

/// Runs the tasks that a call is cut into, which do not depend on each other. Derive from it to run them on
/// threads of the caller's. Set as options.executor, it must outlive the call; the results are the same bits
/// for every one.
class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;

  /// How many workers run() may have, >= 1; the same as long as a call uses the executor.
  virtual int threads() const = 0;

  /// Calls task(i, worker) once for each 0 <= i < count, in any order, and returns when all calls have ended;
  /// what they wrote is then visible to the caller. worker is in [0, threads()), and calls of one run() that
  /// overlap in time have different workers; calls of different runs may have the same.
  /// If calls throw, run() drops what tasks it can, waits for the others and rethrows one of the exceptions.
  virtual void run(Index count, TaskRef task) = 0;
};

/// The calling thread alone, task after task: what a call without an executor uses.
class SerialExecutor final : public Executor {
 public:
  int threads() const override { return 1; }
  void run(Index count, TaskRef task) override {
    for (Index i = 0; i < count; ++i) task(i, 0);
  }
};

namespace detail {

// The first exception of the calls that several threads make; after it, calls are dropped.
class FirstException {
 public:
  void call(TaskRef task, Index i, int worker) noexcept {
    if (failed_.test(std::memory_order_relaxed)) return;
    try {
      task(i, worker);
    } catch (...) {
      if (!failed_.test_and_set()) exception_ = std::current_exception();
    }
  }

  // Once every call has ended.
  void rethrow() const {
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  std::atomic_flag failed_;
  std::exception_ptr exception_;
};

}  // namespace detail

/// Threads of its own, one fewer than `threads`: the caller of run() is worker 0. run() allocates nothing. It
/// may be called from several threads, and from within tasks; while the pool is busy with one run, any other
/// is done by its caller alone, as worker 0, so that no run waits for another.
class ThreadPool final : public Executor {
 public:
  /// threads: with the caller's; by default as many as the machine runs at once. Throws std::invalid_argument
  /// if threads < 1, std::system_error if a thread cannot be started.
  explicit ThreadPool(int threads = std::max(1, int(std::thread::hardware_concurrency()))) {
    if (threads < 1) detail::Check("ThreadPool").fail("threads = ", threads, " is less than 1");
    workers_.reserve(std::size_t(threads) - 1);
    for (int worker = 1; worker < threads; ++worker)
      workers_.emplace_back([this, worker](const std::stop_token& stop) { serve(stop, worker); });
  }

  int threads() const override { return int(workers_.size()) + 1; }

  void run(Index count, TaskRef task) override {
    if (count <= 1 || workers_.empty() || busy_.test_and_set(std::memory_order_acquire)) {
      SerialExecutor().run(count, task);
      return;
    }
    Run run{task, count};
    run_ = &run;
    state_ = open;
    wake_workers();
    run.work(0);
    state_ -= open;
    while (const std::uint32_t joined = state_) await_change(state_, joined);
    busy_.clear(std::memory_order_release);
    run.exception.rethrow();
  }

 private:
  struct Run {
    TaskRef task;
    Index count;
    std::atomic<Index> next{0};
    detail::FirstException exception{};

    void work(int worker) {
      for (Index i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
        exception.call(task, i, worker);
    }
  };

  void serve(const std::stop_token& stop, int worker) {
    const std::stop_callback on_stop(stop, [this] { wake_workers(); });
    for (std::uint32_t seen = 0; !stop.stop_requested(); seen = await_change(wakings_, seen)) {
      if (!join()) continue;
      run_->work(worker);
      if ((state_ -= one_worker) == 0) state_.notify_one();
    }
  }

  // Is there a run to take part in? If so it does not end before this worker has left it, however late the
  // worker wakes: joining and closing a run are changes of the same word.
  bool join() {
    std::uint32_t state = state_;
    while (state & open)
      if (state_.compare_exchange_weak(state, state + one_worker)) return true;
    return false;
  }

  void wake_workers() {
    ++wakings_;
    wakings_.notify_all();
  }

  // The value once it is not `old`. Falling asleep and being woken take as long as a short run, so it looks
  // for a few microseconds first.
  static std::uint32_t await_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    for (int i = 0; i < 32 && value == old; ++i) std::this_thread::yield();
    value.wait(old);
    return value;
  }

  static constexpr std::uint32_t open = 1, one_worker = 2;

  std::atomic_flag busy_;                  // some run() uses what follows
  Run* run_ = nullptr;                     // read by workers that joined it
  std::atomic<std::uint32_t> state_{0};    // whether run_ may be joined, and how many workers have
  std::atomic<std::uint32_t> wakings_{0};  // a worker that has seen the last one sleeps
  std::vector<std::jthread> workers_;      // last: they are stopped and joined before the rest is destroyed
};

#ifdef _OPENMP

/// The threads of OpenMP, in a program that is compiled for it (-fopenmp). Within a parallel region OpenMP
/// gives run() one thread, unless nested parallelism is switched on.
class OpenMPExecutor final : public Executor {
 public:
  /// threads: by default OpenMP's own number. Throws std::invalid_argument if threads < 1.
  explicit OpenMPExecutor(int threads = omp_get_max_threads()) : threads_(threads) {
    if (threads < 1) detail::Check("OpenMPExecutor").fail("threads = ", threads, " is less than 1");
  }

  int threads() const override { return threads_; }

  void run(Index count, TaskRef task) override {
    detail::FirstException exception;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_)
    for (Index i = 0; i < count; ++i) exception.call(task, i, omp_get_thread_num());
    exception.rethrow();
  }

 private:
  int threads_;
};

#endif

}  // namespace momentum_delta
