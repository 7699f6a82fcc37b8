/// \file
/// Memory that calls use and keep for the next call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "momentum_delta/types.hpp"

namespace momentum_delta {

namespace detail {

struct Scratch;

// What every block of a workspace is aligned to: a cache line, and the widest vector register.
inline constexpr std::size_t workspace_alignment = 64;

// Aligned memory that grows to the largest need; what it held is then lost.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory& other) {
    if (other.bytes_ > 0) std::memcpy(reserve(other.bytes_), other.memory_.get(), other.bytes_);
  }
  Memory(Memory&& other) noexcept
      : memory_(std::move(other.memory_)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* reserve(std::size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t(workspace_alignment))));
      bytes_ = bytes;
    }
    return memory_.get();
  }
  std::byte* get() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t(workspace_alignment));
    }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace detail

/// Set as options.workspace, it serves any number of calls of any shape and type, one at a time: two calls at
/// once need two. It grows to the largest need and then allocates no more. Without one, each call allocates
/// and frees its own.
class Workspace {
 public:
  std::size_t bytes() const { return memory_.bytes(); }  ///< that it holds: the largest need so far

 private:
  friend struct detail::Scratch;
  detail::Memory memory_;
};

namespace detail {

// Hands out aligned blocks of one worker's share, in order. Made without memory it hands out null and counts:
// a kernel constructed on such an arena says what it needs.
class Arena {
 public:
  explicit Arena(std::byte* memory = nullptr) : memory_(memory) {}

  template <class T>
  T* take(Index count) {
    T* const block = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    const std::size_t bytes = std::size_t(count) * sizeof(T);
    used_ += (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
    return block;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

// A share of a workspace for each worker.
struct Scratch {
  std::byte* memory;
  std::size_t share;

  Scratch(Workspace& workspace, int workers, std::size_t bytes)
      : memory(workspace.memory_.reserve(std::size_t(workers) * bytes)), share(bytes) {}
  Arena arena(int worker) const { return Arena(memory ? memory + std::size_t(worker) * share : nullptr); }
};

}  // namespace detail
}  // namespace momentum_delta
