#include "calls.hpp"

namespace test {

std::byte* Circumstances::place(std::size_t element, std::span<const Index> shape, std::span<Index>) {
  std::size_t bytes = element;
  for (const Index size : shape) bytes *= std::size_t(size);
  return heap_.emplace_back().reserve(std::max<std::size_t>(bytes, 1));
}

void Circumstances::make(const std::string&, const std::function<void(momentum_delta::Workspace*)>& call) {
  call(nullptr);
}

std::string difference(const Given& a, const Given& b) {
  for (const auto& [name, bytes] : a)
    if (const auto found = b.find(name); found == b.end() || found->second != bytes) return name;
  for (const auto& [name, bytes] : b)
    if (!a.contains(name)) return name;
  return "";
}

}  // namespace test
