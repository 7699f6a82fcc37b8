// The files of verified values in tests/data.
#pragma once

#include <algorithm>
#include <filesystem>

#include "../../examples/support/case_file.hpp"

namespace test {

struct GoldenFile {
  std::string path;
  safetensors::File file;
};

// Those of one kind (examples::kind_of): "" is the rule.
inline std::vector<GoldenFile> golden_files(const std::string& kind) {
  std::vector<GoldenFile> files;
  for (const auto& entry : std::filesystem::directory_iterator(TEST_DATA_DIR)) {
    if (entry.path().extension() != ".safetensors") continue;
    GoldenFile golden{entry.path().string(), safetensors::read(entry.path().string())};
    if (examples::kind_of(golden.file) == kind) files.push_back(std::move(golden));
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return files;
}

}  // namespace test
