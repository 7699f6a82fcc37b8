// Tensors beside memory that must not be touched: reading or writing one byte of it ends the program.
#pragma once

#include "calls.hpp"
#include "catch.hpp"

#if defined(__unix__) || defined(__APPLE__)
#define TEST_GUARD_PAGES
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace test {

#if defined(TEST_GUARD_PAGES)

// Whole pages between two inaccessible ones, kept for the next tensor of so many.
class GuardedPages {
 public:
  GuardedPages() = default;
  GuardedPages(const GuardedPages&) = delete;
  ~GuardedPages() {
    for (const auto& [bytes, unused] : unused_)
      for (std::byte* const first : unused) munmap(first - page(), bytes + 2 * page());
  }

  static std::size_t page() { return std::size_t(sysconf(_SC_PAGESIZE)); }
  std::byte* take(std::size_t bytes) {
    std::vector<std::byte*>& unused = unused_[bytes];
    if (!unused.empty()) {
      std::byte* const first = unused.back();
      unused.pop_back();
      return first;
    }
    void* const all = mmap(nullptr, bytes + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    std::byte* const first = static_cast<std::byte*>(all) + page();
    if (bytes > 0 && mprotect(first, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    return first;
  }
  void put_back(std::byte* first, std::size_t bytes) { unused_[bytes].push_back(first); }

 private:
  std::map<std::size_t, std::vector<std::byte*>> unused_;
};

class Guarded final : public Circumstances {
 public:
  enum class At { end, beginning };  // where the inaccessible page is

  Guarded(GuardedPages& pages, At at) : pages_(pages), at_(at) {}
  ~Guarded() override {
    for (const auto& [first, bytes] : taken_) pages_.put_back(first, bytes);
  }

  std::byte* place(std::size_t element, std::span<const Index> shape, std::span<Index>) override {
    std::size_t bytes = element;
    for (const Index size : shape) bytes *= std::size_t(size);
    const std::size_t page = GuardedPages::page(), inside = (bytes + page - 1) / page * page;
    std::byte* const first = pages_.take(inside);
    taken_.emplace_back(first, inside);
    return at_ == At::beginning ? first : first + (inside - bytes);
  }

  void make(const std::string& name, const std::function<void(momentum_delta::Workspace*)>& call) override {
    INFO(name);
    call(nullptr);
  }

 private:
  GuardedPages& pages_;
  At at_;
  std::vector<std::pair<std::byte*, std::size_t>> taken_;
};

#endif

}  // namespace test
