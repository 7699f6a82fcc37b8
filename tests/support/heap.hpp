// Counts what this program takes from the heap, and fills it with NaN: a result that depends on memory nobody
// wrote is then no number. With glibc, whose functions these replace; weak, so that several files of a
// program may include it. A sanitizer has a malloc of its own: nothing is counted or filled then.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <momentum_delta/types.hpp>  // clang's <mm_malloc.h> must declare posix_memalign before it is defined

#include "sanitizer.hpp"

namespace test {

inline std::atomic<long> allocations = 0;

#if defined(__GLIBC__) && !defined(TEST_SANITIZER)
inline constexpr bool heap_is_counted = true;
#else
inline constexpr bool heap_is_counted = false;
#endif

template <class Call>
long allocations_of(const Call& call) {
  const long before = allocations;
  call();
  return allocations - before;
}

inline void* counted(void* memory, std::size_t size) {
  ++allocations;
  if (memory != nullptr) std::memset(memory, 0xff, size);  // bytes of a NaN, of every type
  return memory;
}

}  // namespace test

#if defined(__GLIBC__) && !defined(TEST_SANITIZER)

extern "C" {

void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

// All that operator new and Eigen call.
[[gnu::weak]] void* malloc(std::size_t size) {
  return test::counted(__libc_malloc(size), size);
}
[[gnu::weak]] void* calloc(std::size_t count, std::size_t size) {
  ++test::allocations;
  return __libc_calloc(count, size);
}
[[gnu::weak]] void* realloc(void* memory, std::size_t size) {
  ++test::allocations;
  return __libc_realloc(memory, size);
}
[[gnu::weak]] void* memalign(std::size_t alignment, std::size_t size) {
  return test::counted(__libc_memalign(alignment, size), size);
}
[[gnu::weak]] void* aligned_alloc(std::size_t alignment, std::size_t size) {
  return test::counted(__libc_memalign(alignment, size), size);
}
[[gnu::weak]] int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  *memory = test::counted(__libc_memalign(alignment, size), size);
  return *memory == nullptr ? ENOMEM : 0;
}

}  // extern "C"

#endif
