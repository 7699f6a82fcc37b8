// What every Executor promises, and what ThreadPool adds. Tasks only record: Catch2 checks from one thread.
#include <momentum_delta/executor.hpp>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>

#include "support/catch.hpp"
#include "support/heap.hpp"

using momentum_delta::Executor;
using momentum_delta::Index;
using momentum_delta::SerialExecutor;
using momentum_delta::TaskRef;
using momentum_delta::ThreadPool;

namespace {

// Every kind of executor, for each number of threads.
std::vector<std::unique_ptr<Executor>> executors() {
  std::vector<std::unique_ptr<Executor>> all;
  all.push_back(std::make_unique<SerialExecutor>());
  for (const int threads : {1, 2, 3, 8}) {
    all.push_back(std::make_unique<ThreadPool>(threads));
#ifdef _OPENMP
    all.push_back(std::make_unique<momentum_delta::OpenMPExecutor>(threads));
#endif
  }
  return all;
}

// Counts the calls of each task of one run, and those with a worker out of range or already at work.
class Calls {
 public:
  Calls(const Executor& executor, Index count)
      : made_(std::size_t(count)), at_work_(std::size_t(executor.threads())) {}

  template <class Body>
  void record(Index i, int worker, const Body& body) {
    if (i < 0 || i >= Index(made_.size()) || worker < 0 || worker >= int(at_work_.size())) {
      ++bad_;
      return;
    }
    std::atomic<int>& at_work = at_work_[std::size_t(worker)];
    if (++at_work > 1) ++bad_;
    ++made_[std::size_t(i)];
    body();
    --at_work;
  }

  // Was every task called once, and every worker as promised?
  bool right() const { return right(0) && std::count(made_.begin(), made_.end(), 1) == Index(made_.size()); }
  // As after an exception, when tasks may be missing and `running` workers never said that they ended.
  bool right(int running) const {
    return bad_ == 0 && std::accumulate(at_work_.begin(), at_work_.end(), 0) == running &&
           std::all_of(made_.begin(), made_.end(), [](int made) { return made <= 1; });
  }

 private:
  std::vector<int> made_;  // not atomic: run() makes them visible
  std::vector<std::atomic<int>> at_work_;
  std::atomic<int> bad_ = 0;
};

void nothing() {}

bool runs_right(Executor& executor, Index count, const std::function<void()>& body = nothing) {
  Calls calls(executor, count);
  executor.run(count, [&](Index i, int worker) { calls.record(i, worker, body); });
  return calls.right();
}

// False if it does not come true within ten seconds.
template <class Condition>
bool eventually(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// Does every thread take part: can as many tasks as there are threads be under way at once?
bool all_take_part(Executor& executor) {
  const int threads = executor.threads();
  std::atomic<int> started = 0, met = 0;
  std::vector<std::thread::id> thread_of;
  thread_of.resize(std::size_t(threads));
  executor.run(threads, [&](Index, int worker) {
    ++started;
    if (eventually([&] { return started == threads; })) ++met;
    thread_of[std::size_t(worker)] = std::this_thread::get_id();
  });
  return met == threads && thread_of[0] == std::this_thread::get_id() &&
         int(std::set<std::thread::id>(thread_of.begin(), thread_of.end()).size()) == threads;
}

template <class Make>
std::string refusal(const Make& make) {
  try {
    make();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

void plain_function(Index, int) {}

}  // namespace

TEST_CASE("TaskRef calls the object that it was made from") {
  static_assert(std::is_trivially_copyable_v<TaskRef>);
  static_assert(!std::is_constructible_v<TaskRef, int&>);
  static_assert(!std::is_constructible_v<TaskRef, void (&)(Index)>);

  Index sum = 0;
  auto add = [&sum, calls = 0](Index i, int worker) mutable {
    return sum += i + 10 * worker + 100 * calls++;
  };
  const TaskRef first = add;
  const TaskRef second = first;
  first(1, 2);
  second(1, 2);
  CHECK(sum == 21 + 121);

  const auto subtract = [&](Index i, int) { sum -= i; };
  TaskRef{subtract}(142, 0);
  CHECK(sum == 0);
  TaskRef{&plain_function}(0, 0);
}

TEST_CASE("every task is called once, and workers are in range and exclusive") {
  for (const auto& executor : executors()) {
    INFO(executor->threads() << " threads");
    for (const Index count : {0, 1, 2, 7, 1000}) {
      INFO(count << " tasks");
      CHECK(runs_right(*executor, count));
      CHECK(runs_right(*executor, count, [] { std::this_thread::yield(); }));
    }
    executor->run(-1, [](Index, int) { std::abort(); });
  }
}

TEST_CASE("every thread takes part, also after it has slept") {
  for (const auto& executor : executors()) {
    INFO(executor->threads() << " threads");
    for (const int milliseconds : {0, 0, 0, 5, 5, 5}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      REQUIRE(all_take_part(*executor));
    }
  }
}

TEST_CASE("an exception is rethrown once the running tasks have ended") {
  for (const auto& executor : executors()) {
    INFO(executor->threads() << " threads");
    for (const Index thrower : {0, 3, 99}) {
      Calls calls(*executor, 100);
      std::atomic<int> started = 0, ended = 0;
      std::string message;
      try {
        executor->run(100, [&](Index i, int worker) {
          calls.record(i, worker, [&] {
            ++started;
            if (i == thrower) throw std::runtime_error("task " + std::to_string(i));
            std::this_thread::sleep_for(std::chrono::microseconds(100));
            ++ended;
          });
        });
      } catch (const std::runtime_error& e) {
        message = e.what();
      }
      CHECK(message == "task " + std::to_string(thrower));
      CHECK(started == ended + 1);
      CHECK(calls.right(1));
      CHECK(runs_right(*executor, 100));
      REQUIRE(all_take_part(*executor));
    }
  }
}

TEST_CASE("of many exceptions one is rethrown") {
  for (const auto& executor : executors()) {
    INFO(executor->threads() << " threads");
    const auto exceptions = std::make_shared<int>();  // counted by its use_count
    for (int repeat = 0; repeat < 100; ++repeat) {
      int caught = 0;
      try {
        executor->run(10, [&](Index, int) { throw exceptions; });
      } catch (const std::shared_ptr<int>&) {
        ++caught;
      }
      REQUIRE(caught == 1);
      REQUIRE(exceptions.use_count() == 1);
    }
    CHECK(runs_right(*executor, 100));
  }
}

TEST_CASE("runs within tasks") {
  for (const auto& outer : executors()) {
    for (const auto& other : executors()) {
      for (Executor* inner : {outer.get(), other.get()}) {
        INFO(inner->threads() << " threads within " << outer->threads());
        std::atomic<int> right = 0;
        CHECK(runs_right(*outer, 8,
                         [&] { right += runs_right(*inner, 5, [&] { right += runs_right(*outer, 3); }); }));
        CHECK(right == 8 * 5 + 8);
      }
    }
  }
}

TEST_CASE("an exception of a run within a task reaches the outer run") {
  for (const auto& executor : executors()) {
    INFO(executor->threads() << " threads");
    const auto inner = [](Index i, int) {
      if (i == 2) throw std::runtime_error("inner");
    };
    CHECK_THROWS_AS(executor->run(8, [&](Index, int) { executor->run(5, inner); }), std::runtime_error);
    CHECK(runs_right(*executor, 100));
  }
}

TEST_CASE("while the pool is busy, another run is its caller's alone, as worker 0") {
  for (const int threads : {2, 3}) {
    ThreadPool pool(threads);
    std::atomic<int> wrong = 0, made = 0;
    const auto run_alone = [&] {
      const auto caller = std::this_thread::get_id();
      Index next = 0;
      pool.run(5, [&](Index i, int worker) {
        ++made;
        if (i != next++ || worker != 0 || std::this_thread::get_id() != caller) ++wrong;
      });
    };
    pool.run(4, [&](Index, int) {
      run_alone();
      std::jthread{run_alone};  // would wait for ever if its run() waited for this one
    });
    CHECK(made == 2 * 4 * 5);
    CHECK(wrong == 0);
    CHECK(all_take_part(pool));
  }
}

TEST_CASE("several threads call one executor") {
  for (const auto& executor : executors()) {
    INFO(executor->threads() << " threads");
    std::atomic<int> wrong = 0;
    {
      std::vector<std::jthread> callers;
      for (int caller = 0; caller < 4; ++caller)
        callers.emplace_back([&] {
          for (int repeat = 0; repeat < 300; ++repeat) wrong += !runs_right(*executor, 7);
        });
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("many short runs: no worker is late, or takes one run for another") {
  for (const int threads : {2, 3, 8}) {
    ThreadPool pool(threads);
    std::atomic<int> current = -1;
    std::atomic<int> late = 0;
    int wrong = 0;
    for (int repeat = 0; repeat < 20000; ++repeat) {
      current = repeat;
      std::array<int, 3> made{};  // where the last run had its own
      const auto task = [&, repeat](Index i, int) {
        // Some runs end before any worker comes, and some after.
        for (int spin = repeat % 50; spin >= 0; --spin)
          if (current != repeat) ++late;
        ++made[std::size_t(i)];
      };
      pool.run(3, task);
      wrong += made != std::array{1, 1, 1};
    }
    CHECK(late == 0);
    CHECK(wrong == 0);
  }
}

TEST_CASE("pools come and go") {
  for (int repeat = 0; repeat < 200; ++repeat) {
    ThreadPool idle(3);  // destroyed before its workers have begun, or as they fall asleep
    ThreadPool pool(4);
    REQUIRE(runs_right(pool, 5));
  }
  CHECK(ThreadPool().threads() >= 1);
}

TEST_CASE("run() of a pool allocates nothing") {
  if (!test::heap_is_counted) return;
  for (const int threads : {1, 2, 8}) {
    ThreadPool pool(threads);
    std::atomic<int> made = 0;
    const long before = test::allocations;
    for (int repeat = 0; repeat < 200; ++repeat)
      pool.run(100, [&](Index, int) { pool.run(2, [&](Index, int) { ++made; }); });
    const long allocated = test::allocations - before;
    CHECK(allocated == 0);
    CHECK(made == 200 * 100 * 2);
  }
}

TEST_CASE("a pool has at least one thread") {
  for (const int threads : {0, -1}) {
    const std::string rest = ": threads = " + std::to_string(threads) + " is less than 1";
    CHECK(refusal([&] { ThreadPool pool(threads); }) == "momentum_delta::ThreadPool" + rest);
#ifdef _OPENMP
    CHECK(refusal([&] { momentum_delta::OpenMPExecutor omp(threads); }) ==
          "momentum_delta::OpenMPExecutor" + rest);
#endif
  }
}

#ifdef _OPENMP
TEST_CASE("executors within a parallel region") {
  for (const auto& executor : executors()) {
    INFO(executor->threads() << " threads");
    std::atomic<int> right = 0;
    const int regions = 4;
#pragma omp parallel for num_threads(2)
    for (int region = 0; region < regions; ++region) right += runs_right(*executor, 100);
    CHECK(right == regions);
  }
  CHECK(momentum_delta::OpenMPExecutor().threads() == omp_get_max_threads());
}
#endif
