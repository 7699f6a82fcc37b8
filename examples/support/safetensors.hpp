// Reads and writes .safetensors files: a JSON header (name -> dtype, shape, bytes) and the tensors' data,
// little-endian. Writing uses POSIX calls.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace safetensors {

using Index = std::int64_t;

// One tensor: shape and raw bytes, converted on request.
struct Tensor {
  std::string dtype;
  std::vector<Index> shape;
  std::vector<std::byte> bytes;

  Index size() const {
    Index n = 1;
    for (const Index d : shape) n *= d;
    return n;
  }

  // Of float or double values, row-major. Throws if they are not as many as the shape says.
  template <class Scalar>
  static Tensor of(std::vector<Index> shape, std::span<const Scalar> values) {
    static_assert(std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>);
    Tensor tensor{sizeof(Scalar) == 4 ? "F32" : "F64", std::move(shape), {}};
    if (tensor.size() != Index(values.size()))
      throw std::runtime_error("has " + std::to_string(values.size()) + " values, not the " +
                               std::to_string(tensor.size()) + " of its shape");
    const auto bytes = std::as_bytes(values);
    tensor.bytes.assign(bytes.begin(), bytes.end());
    return tensor;
  }

  // The values as Scalar, row-major. BF16, F16, F32 and F64 convert to any floating-point Scalar, I32 and I64
  // to any integer; anything else throws.
  template <class Scalar>
  std::vector<Scalar> as() const {
    if constexpr (std::is_floating_point_v<Scalar>) {
      if (dtype == "F32") return convert<float, Scalar>();
      if (dtype == "F64") return convert<double, Scalar>();
      if (dtype == "BF16") return convert<Eigen::bfloat16, Scalar>();
      if (dtype == "F16") return convert<Eigen::half, Scalar>();
      throw std::runtime_error("has dtype " + dtype + ", not F32, F64, BF16 or F16");
    } else {
      if (dtype == "I32") return convert<std::int32_t, Scalar>();
      if (dtype == "I64") return convert<std::int64_t, Scalar>();
      throw std::runtime_error("has dtype " + dtype + ", not I32 or I64");
    }
  }

 private:
  template <class Stored, class Scalar>
  std::vector<Scalar> convert() const {
    std::vector<Scalar> out(bytes.size() / sizeof(Stored));
    for (std::size_t i = 0; i < out.size(); ++i) {
      Stored x;
      std::memcpy(static_cast<void*>(&x), bytes.data() + i * sizeof(Stored), sizeof(Stored));
      if constexpr (std::is_same_v<Stored, Eigen::bfloat16> || std::is_same_v<Stored, Eigen::half>) {
        out[i] = static_cast<Scalar>(static_cast<float>(x));
      } else {
        out[i] = static_cast<Scalar>(x);
      }
    }
    return out;
  }
};

struct File {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;

  bool has(const std::string& name) const { return tensors.contains(name); }
};

inline Index dtype_size(const std::string& dtype) {
  static const std::map<std::string, Index> sizes = {
      {"F64", 8}, {"I64", 8}, {"U64", 8}, {"F32", 4}, {"I32", 4},  {"U32", 4},     {"F16", 2},    {"BF16", 2},
      {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
  const auto found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

// The file of so many bytes that `in` holds. Throws std::runtime_error, saying what is wrong, unless all of it
// is well formed: one JSON object without a name twice, and tensors that fill the data from its first byte to
// its last without a gap or an overlap. No memory is taken for a tensor before that is known. A tensor of a
// dtype not known here throws only when it is asked for.
inline File read(std::istream& in, std::uint64_t file_size) {
  static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");
  const auto fail = [](const std::string& what) { throw std::runtime_error(what); };

  std::uint64_t header_size = 0;
  if (file_size < 8 || !in.read(reinterpret_cast<char*>(&header_size), 8))
    fail("is shorter than its 8-byte header size");
  if (header_size > file_size - 8)
    fail("is truncated: its header should have " + std::to_string(header_size) + " bytes");
  std::string header(header_size, '\0');
  if (!in.read(header.data(), std::streamsize(header_size))) fail("cannot be read");
  const std::uint64_t data_size = file_size - 8 - header_size;

  std::set<std::string> names;
  std::optional<std::string> twice;
  const auto see = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (depth == 1 && event == nlohmann::json::parse_event_t::key && !names.insert(value).second)
      twice = value;
    return true;
  };
  const auto json = nlohmann::json::parse(header, see, /*allow_exceptions=*/false);
  if (!json.is_object()) fail("its header is not a JSON object");
  if (twice) fail("its header names " + *twice + " twice");

  File file;
  std::map<std::uint64_t, std::pair<std::uint64_t, std::string>> ranges;  // begin -> end, name
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) fail("__metadata__ is not an object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) fail("__metadata__." + key + " is not a string");
        file.metadata[key] = value;
      }
      continue;
    }
    const auto is_sizes = [](const nlohmann::json& list) {
      return list.is_array() && std::all_of(list.begin(), list.end(), [](const auto& x) {
               return x.is_number_unsigned() && x.template get<std::uint64_t>() < (std::uint64_t(1) << 62);
             });
    };
    if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
        !entry.contains("shape") || !is_sizes(entry["shape"]) || !entry.contains("data_offsets") ||
        !is_sizes(entry["data_offsets"]) || entry["data_offsets"].size() != 2)
      fail("the header's entry for " + name + " needs dtype, shape and two data_offsets");

    Tensor tensor{entry["dtype"], entry["shape"], {}};
    const std::uint64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    if (begin > end || end > data_size)
      fail("is truncated or malformed: " + name + " has data_offsets [" + std::to_string(begin) + ", " +
           std::to_string(end) + "] of " + std::to_string(data_size) + " bytes");
    const Index element = dtype_size(tensor.dtype);
    std::uint64_t bytes = std::uint64_t(std::max<Index>(element, 1));
    for (const Index d : tensor.shape) {  // no product of sizes may overflow, in any order
      if (d != 0 && bytes > (std::uint64_t(1) << 62) / std::uint64_t(d))
        fail(name + " has an impossible shape");
      bytes *= std::uint64_t(std::max<Index>(d, 1));
    }
    if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) bytes = 0;
    if (element == 0) bytes = end - begin;  // of a dtype not known here
    if (bytes != end - begin)
      fail(name + " should have " + std::to_string(bytes) + " bytes by its shape, but has " +
           std::to_string(end - begin));
    if (bytes > 0 && !ranges.emplace(begin, std::pair(end, name)).second)
      fail(name + " overlaps another tensor");
    file.tensors.emplace(name, std::move(tensor));
  }
  std::uint64_t next = 0;
  for (const auto& [begin, range] : ranges) {
    if (begin < next) fail(range.second + " overlaps another tensor");
    if (begin > next) fail("has a gap before " + range.second);
    next = range.first;
  }
  if (next != data_size) fail("has " + std::to_string(data_size - next) + " bytes after its last tensor");

  for (const auto& [begin, range] : ranges) {  // which follow each other
    std::vector<std::byte>& bytes = file.tensors.at(range.second).bytes;
    bytes.resize(range.first - begin);
    if (!in.read(reinterpret_cast<char*>(bytes.data()), std::streamsize(bytes.size())))
      fail("cannot be read");
  }
  return file;
}

inline File read(const std::string& path) {
  std::error_code error;
  const auto file_size = std::filesystem::file_size(path, error);
  if (error) throw std::runtime_error(error.message());
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot be opened");
  return read(in, file_size);
}

// Replaces the file at `path` at once: it is complete in a temporary file beside it before it takes the name,
// so that whenever this is interrupted, `path` holds either what it held before or all of `file`. Throws
// std::runtime_error, saying what is wrong, if a tensor's bytes are not those of its dtype and shape, or the
// system refuses; `path` is then as it was.
inline void write(const std::string& path, const File& file) {
  static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");
  nlohmann::json header = nlohmann::json::object();
  if (!file.metadata.empty()) header["__metadata__"] = file.metadata;
  std::uint64_t at = 0;
  for (const auto& [name, tensor] : file.tensors) {
    const Index element = dtype_size(tensor.dtype);
    if (name == "__metadata__") throw std::runtime_error("no tensor can be named __metadata__");
    if (element == 0) throw std::runtime_error(name + " has the unknown dtype " + tensor.dtype);
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](Index d) { return d < 0; }))
      throw std::runtime_error(name + " has a negative size");
    if (tensor.size() * element != Index(tensor.bytes.size()))
      throw std::runtime_error(name + " should have " + std::to_string(tensor.size() * element) +
                               " bytes by its shape, but has " + std::to_string(tensor.bytes.size()));
    header[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {at, at + tensor.bytes.size()}}};
    at += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data is aligned

  const std::filesystem::path target(path);
  const std::string temporary = path + ".tmp" + std::to_string(::getpid());
  int descriptor = -1;
  const auto fail = [&](const std::string& what) {
    const std::string why = std::strerror(errno);
    if (descriptor >= 0) {
      ::close(descriptor);
      ::unlink(temporary.c_str());
    }
    throw std::runtime_error(what + ": " + why);
  };
  descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (descriptor < 0) fail("cannot create " + temporary);
  const auto put = [&](const void* data, std::size_t size) {
    for (const char* next = static_cast<const char*>(data); size > 0;) {
      const ssize_t written = ::write(descriptor, next, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("cannot write " + temporary);
      next += written;
      size -= std::size_t(written);
    }
  };
  const std::uint64_t header_size = text.size();
  put(&header_size, 8);
  put(text.data(), text.size());
  for (const auto& [name, tensor] : file.tensors) put(tensor.bytes.data(), tensor.bytes.size());
  if (::fsync(descriptor) != 0) fail("cannot write " + temporary);
  if (::rename(temporary.c_str(), path.c_str()) != 0) fail("cannot replace " + path);
  ::close(descriptor);

  // The new name is on the disk once the folder is.
  const std::string folder = target.has_parent_path() ? target.parent_path().string() : ".";
  descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) return;
  ::fsync(descriptor);  // a file system that cannot has no better way
  ::close(descriptor);
}

}  // namespace safetensors
