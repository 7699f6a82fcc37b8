// The check_case program as its users run it: output, exit status, and files that are not what they should
// be.
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/catch.hpp"
#include "support/problem.hpp"

using namespace test;

namespace {

struct Run {
  int status;
  std::string output;  // standard output and error
  bool says(const std::string& text) const { return output.find(text) != std::string::npos; }
};

Run check_case(const std::string& arguments) {
  FILE* pipe = popen((std::string(CHECK_CASE) + " " + arguments + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  Run run{0, {}};
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) run.output.append(buffer, n);
  run.status = WEXITSTATUS(pclose(pipe));
  return run;
}

// A .safetensors file that is gone with its owner.
class TemporaryFile {
 public:
  TemporaryFile() {
    static int count = 0;
    path = (std::filesystem::temp_directory_path() /
            ("check_case_" + std::to_string(getpid()) + "_" + std::to_string(count++) + ".safetensors"))
               .string();
  }
  ~TemporaryFile() { std::filesystem::remove(path); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const std::string& header, const std::string& data) const {
    std::ofstream out(path, std::ios::binary);
    const std::uint64_t size = header.size();
    out.write(reinterpret_cast<const char*>(&size), 8) << header << data;
  }
  std::string path;
};

using Tensors = std::vector<std::pair<std::string, const Array<double>*>>;

Tensors inputs_of(const Problem<double>& x) {
  return {{"q", &x.q},
          {"k", &x.k},
          {"v", &x.v},
          {"p", &x.p},
          {"log_alpha", &x.log_alpha},
          {"log_mu", &x.log_mu},
          {"beta", &x.beta},
          {"eta", &x.eta},
          {"initial_S", &x.initial_S},
          {"initial_M", &x.initial_M}};
}

template <class Stored>
void write_case(const TemporaryFile& file, const std::string& dtype, const Tensors& tensors) {
  nlohmann::json header;
  std::string data;
  for (const auto& [name, array] : tensors) {
    const std::size_t begin = data.size();
    for (const double value : array->values) {
      const Stored stored = static_cast<Stored>(value);
      data.append(reinterpret_cast<const char*>(&stored), sizeof stored);
    }
    header[name] = {{"dtype", dtype}, {"shape", array->shape}, {"data_offsets", {begin, data.size()}}};
  }
  file.write(header.dump(), data);
}

const std::string golden = TEST_DATA_DIR "/ragged_with_initial_state.safetensors";

}  // namespace

TEST_CASE("check_case prints a line for each file, kernel, chunk, scalar and tensor") {
  const Run run = check_case("--chunk 1,16 " + golden);
  CHECK(run.status == 0);
  std::istringstream lines(run.output);
  int count = 0;
  for (std::string line; std::getline(lines, line) && line.find('\t') != std::string::npos; ++count) {
    CHECK(std::count(line.begin(), line.end(), '\t') == 6);
    CHECK(line.starts_with(golden + "\t"));
  }
  CHECK(count == 2 * 3 * 3);  // float, double; recurrent, chunk 1, chunk 16; o, final_S, final_M
  CHECK(run.output.ends_with("\n18 passed, 0 failed\n"));

  const Run one = check_case("--kernel recurrent --scalar double " + golden);
  CHECK(one.output.ends_with("\n3 passed, 0 failed\n"));
  CHECK(one.says("\trecurrent\t-\tdouble\tfinal_M\t"));
}

TEST_CASE("check_case fails on an error above the bound") {
  const Run run = check_case("--max-error 1e-20 --kernel recurrent --scalar float " + golden);
  CHECK(run.status == 1);
  CHECK(run.output.ends_with("\n0 passed, 3 failed\n"));
}

TEST_CASE("check_case without expected values compares with the recurrence in double, in every dtype") {
  const Problem<double> x = random_problem(1, {.T = 12, .HK = 1, .HV = 2});
  const Tensors tensors = {{"q", &x.q}, {"k", &x.k}, {"v", &x.v}, {"log_mu", &x.log_mu}};
  const TemporaryFile file;
  const auto passes = [&] {
    const Run run = check_case("--chunk 5 " + file.path);
    INFO(run.output);
    CHECK(run.status == 0);
    CHECK(run.output.ends_with("\n12 passed, 0 failed\n"));
  };
  write_case<float>(file, "F32", tensors);
  passes();
  write_case<double>(file, "F64", tensors);
  passes();
  write_case<Eigen::bfloat16>(file, "BF16", tensors);
  passes();
  write_case<Eigen::half>(file, "F16", tensors);
  passes();
}

TEST_CASE("check_case sees a wrong value and a NaN") {
  Problem<double> x = random_problem(1, {.T = 12});
  Results<double> y = examples::run(x.as<double>(), recurrent());
  Tensors tensors = inputs_of(x);
  tensors.emplace_back("o", &y.o);
  const TemporaryFile file;
  write_case<double>(file, "F64", tensors);
  CHECK(check_case(file.path).status == 0);
  y.o.values[3] += 0.1;
  write_case<double>(file, "F64", tensors);
  CHECK(check_case(file.path).status == 1);
  y.o.values[3] = std::nan("");
  write_case<double>(file, "F64", tensors);
  CHECK(check_case(file.path).status == 1);
}

TEST_CASE("check_case --backward checks every gradient of the file") {
  const Run run = check_case("--backward --chunk 1,16 " + golden);
  CHECK(run.status == 0);
  CHECK(run.output.ends_with(
      "\n78 passed, 0 failed\n"));  // float, double; three kernels; 3 values and 10 gradients
  for (const char* name :
       {"dq", "dk", "dv", "dp", "dlog_alpha", "dlog_mu", "dbeta", "deta", "dinitial_S", "dinitial_M"})
    CHECK(run.says(std::string("\tchunk\t16\tdouble\t") + name + "\t"));

  // Some gradients of some upstream ones; a wrong one fails; none at all are computed by the recurrence.
  Problem<double> x = random_problem(2, {.T = 12, .HK = 1, .HV = 2});
  Upstream<double> dy = random_upstream(2, x);
  dy.dfinal_S = dy.dfinal_M = {};
  Gradients<double> dx = examples::run_backward(x, dy, recurrent());
  Tensors tensors = inputs_of(x);
  tensors.emplace_back("do", &dy.do_);
  const TemporaryFile file;
  write_case<double>(file, "F64", tensors);
  CHECK(check_case("--backward --kernel chunk --scalar double " + file.path)
            .output.ends_with("\n13 passed, 0 failed\n"));
  tensors.emplace_back("dlog_mu", &dx.dlog_mu);
  write_case<double>(file, "F64", tensors);
  CHECK(check_case("--backward --kernel chunk --scalar double " + file.path)
            .output.ends_with("\n4 passed, 0 failed\n"));
  dx.dlog_mu.values[3] *= -1;
  write_case<double>(file, "F64", tensors);
  CHECK(check_case("--backward " + file.path).status == 1);
  CHECK(check_case(file.path).status == 0);
}

TEST_CASE("check_case recognises a selective scan") {
  const std::string scan = TEST_DATA_DIR "/scan_default.safetensors";
  const Run run = check_case("--backward --chunk 1,16 " + scan + " " + golden);
  CHECK(run.status == 0);
  // As many of the other rule; float, double; three kernels; 2 values and 9 gradients.
  CHECK(run.output.ends_with("\n144 passed, 0 failed\n"));
  for (const char* name :
       {"out", "final_state", "du", "ddelta", "dA", "dB", "dC", "dD", "dz", "ddelta_bias", "dinitial_state"})
    CHECK(run.says(std::string("\tchunk\t16\tfloat\t") + name + "\t"));
  CHECK(check_case("--max-error 1e-20 --kernel recurrent --scalar float " + scan).status == 1);

  const TemporaryFile file;
  const auto with = [&](const std::string& metadata, const std::string& tensors, const std::string& why) {
    file.write(R"({"__metadata__": {"kind": "selective_scan")" + metadata + "}" + tensors + "}",
               std::string(40, '\0'));
    const Run bad = check_case(file.path);
    INFO(bad.output);
    CHECK(bad.status == 2);
    CHECK(bad.says(why));
  };
  const std::string tensors = R"(, "u": {"dtype": "F32", "shape": [1, 1, 2], "data_offsets": [0, 8]},
      "delta": {"dtype": "F32", "shape": [1, 1, 2], "data_offsets": [8, 16]},
      "A": {"dtype": "F32", "shape": [2, 1], "data_offsets": [16, 24]},
      "B": {"dtype": "F32", "shape": [1, 1, 1, 1], "data_offsets": [24, 28]},
      "C": {"dtype": "F32", "shape": [1, 1, 1, 1], "data_offsets": [28, 32]},)";
  with("", R"(, "u": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]})", "u has 1 dimensions, not 3");
  with("", R"(, "u": {"dtype": "F32", "shape": [1, 1, 10], "data_offsets": [0, 40]})", "delta is missing");
  with(R"(, "delta_softplus": "1")",
       tensors + R"("D": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]})",
       "its delta_softplus, \"1\", is not True or False");
  with("", tensors + R"("out": {"dtype": "F32", "shape": [1, 2, 1], "data_offsets": [32, 40]})",
       "out has not the shape that u and A call for");
  with("", tensors + R"("dD": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]})",
       "dD is given, but its input is missing");
  with("", tensors + R"("D": {"dtype": "F32", "shape": [1, 2], "data_offsets": [32, 40]})",
       "D has 2 dimensions, not 1");
  file.write(R"({"__metadata__": {"kind": "selective_scan"})" + tensors +
                 R"("D": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]}})",
             std::string(40, '\0'));
  CHECK(check_case(file.path).status == 0);  // all zero, and so is the reference
  const Run upstream = check_case("--backward " + file.path);
  CHECK(upstream.status == 2);
  CHECK(upstream.says("--backward needs a file with dout or dfinal_state"));
}

TEST_CASE("check_case exits with 2 for unusable input and says why") {
  const auto refused = [](const std::string& arguments, const std::string& why) {
    const Run run = check_case(arguments);
    INFO(run.output);
    CHECK(run.status == 2);
    CHECK(run.says(why));
  };
  refused("", "no file given");
  refused("--chunk 0 " + golden, "--chunk takes integers >= 1, not \"0\"");
  refused("--chunk 4, " + golden, "--chunk takes integers >= 1, not \"\"");
  refused("--chunk 4x " + golden, "--chunk takes integers >= 1, not \"4x\"");
  refused("--kernel fused " + golden, "--kernel takes");
  refused("--scalar half " + golden, "--scalar takes");
  refused("--max-error -1 " + golden, "--max-error takes");
  refused("--max-error '' " + golden, "--max-error takes");
  refused("--max-error", "--max-error needs a value");
  refused("--backwards " + golden, "unknown option --backwards");
  refused("/nonexistent.safetensors", "check_case: /nonexistent.safetensors: No such file");

  const TemporaryFile file;
  std::ofstream(file.path) << "abc";
  refused(file.path, "is shorter than its 8-byte header size");
  std::filesystem::copy_file(golden, file.path, std::filesystem::copy_options::overwrite_existing);
  const auto size = std::filesystem::file_size(file.path);
  std::filesystem::resize_file(file.path, size - 8);
  refused(file.path, "is truncated or malformed");
  std::filesystem::resize_file(file.path, 100);
  refused(file.path, "is truncated: its header should have");
  const std::string zeros(64, '\0');
  const auto with_header = [&](const std::string& header, const std::string& why) {
    file.write(header, zeros);
    refused(file.path, why);
  };
  with_header("{\"q\": ", "its header is not a JSON object");
  with_header("[]", "its header is not a JSON object");
  with_header(R"({"q": 3})", "entry for q needs dtype, shape and two data_offsets");
  with_header(R"({"q": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", "entry for q needs");
  with_header(R"({"q": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})",
              "is truncated or malformed: q has data_offsets [4, 0]");
  with_header(R"({"q": {"dtype": "F31", "shape": [1,1,1,4], "data_offsets": [0, 64]}})",
              "q has dtype F31, not F32, F64, BF16 or F16");
  with_header(R"({"q": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}, "q": 3})",
              "its header names q twice");
  with_header(R"({"q": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}})",
              "has 32 bytes after its last tensor");
  with_header(R"({"q": {"dtype": "U8", "shape": [32], "data_offsets": [32, 64]}})", "has a gap before q");
  with_header(R"({"q": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]},
                  "r": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}})",
              "r overlaps another tensor");
  with_header(R"({"q": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}})",
              "q should have 12 bytes by its shape, but has 4");
  with_header(
      R"({"q": {"dtype": "F32", "shape": [4611686018427387903, 4611686018427387903], "data_offsets": [0, 4]}})",
      "q has an impossible shape");
  with_header(R"({"q": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}})",
              "q has 1 dimensions, not 4");
  with_header(R"({"q": {"dtype": "I32", "shape": [1,1,1,16], "data_offsets": [0, 64]}})",
              "q has dtype I32, not F32, F64, BF16 or F16");
  with_header(R"({"q": {"dtype": "F32", "shape": [1,1,1,16], "data_offsets": [0, 64]}})", "k is missing");
  // Tensors of zeros, [shape] in F32, one after another.
  const auto with_tensors = [&](const std::vector<std::pair<std::string, std::vector<Index>>>& tensors,
                                const std::string& scale) {
    nlohmann::json header;
    std::size_t at = 0;
    for (const auto& [name, shape] : tensors) {
      std::size_t bytes = 4;
      for (const Index d : shape) bytes *= std::size_t(d);
      header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {at, at + bytes}}};
      at += bytes;
    }
    header["__metadata__"] = {{"scale", scale}};
    file.write(header.dump(), std::string(at, '\0'));
  };
  const std::vector<std::pair<std::string, std::vector<Index>>> qkv = {
      {"q", {1, 1, 1, 4}}, {"k", {1, 1, 1, 4}}, {"v", {1, 1, 1, 2}}};
  const auto and_also = [&](const std::string& name, const std::vector<Index>& shape) {
    auto tensors = qkv;
    tensors.emplace_back(name, shape);
    return tensors;
  };
  with_tensors(qkv, "0.5x");
  refused(file.path, "its scale, \"0.5x\", is not a number");
  with_tensors(and_also("o", {1, 1, 1, 4}), "0.5");
  refused(file.path, "o has not the shape that q, k and v call for");
  with_tensors(and_also("beta", {1, 1, 2}), "0.5");
  refused(file.path, "beta has shape [1, 1, 2], not [B, T, HV] = [1, 1, 1]");
  with_tensors(and_also("dbeta", {1, 1, 1}), "0.5");
  refused(file.path, "dbeta is given, but its input is missing");
  with_tensors(qkv, "0.5");
  CHECK(check_case(file.path).status == 0);  // all zero, and so is the reference
  refused("--backward " + file.path, "--backward needs a file with do, dfinal_S or dfinal_M");
}

TEST_CASE("check_case checks layers like the rule") {
  const std::string layer = TEST_DATA_DIR "/layer_default.safetensors";
  const Run run = check_case("--chunk 4 --backward " + layer);
  CHECK(run.status == 0);
  CHECK(run.output.ends_with("\n92 passed, 0 failed\n"));  // 2 scalars, 2 kernels; 3 values and 20 gradients
  CHECK(run.says("layer_default.safetensors\trecurrent\t-\tfloat\tdweight.q_conv1d.weight\t"));

  // The file again, with a header and values of one's own.
  const TemporaryFile file;
  std::ifstream in(layer, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  std::uint64_t size;
  std::memcpy(&size, whole.data(), 8);
  const auto header = nlohmann::json::parse(whole.substr(8, size));
  const std::string data = whole.substr(8 + size);
  const auto edited = [&](const std::function<void(nlohmann::json&, std::string&)>& edit) {
    auto new_header = header;
    std::string new_data = data;
    edit(new_header, new_data);
    file.write(new_header.dump(), new_data);
    return check_case("--backward --chunk 4 " + file.path);
  };
  const auto refused = [&](const std::function<void(nlohmann::json&)>& edit, const std::string& why) {
    const Run result = edited([&](nlohmann::json& h, std::string&) { edit(h); });
    INFO(result.output);
    CHECK(result.status == 2);
    CHECK(result.says(why));
  };
  CHECK(edited([](auto&, auto&) {}).status == 0);
  CHECK(edited([](nlohmann::json& h, std::string& values) {
          const std::size_t at = h["dweight.Mu_log"]["data_offsets"][0];
          double first;
          std::memcpy(&first, values.data() + at, 8);
          first *= -1;
          std::memcpy(values.data() + at, &first, 8);
        }).status == 1);
  // Other names in the place of what is expected: the recurrence in double is the reference.
  const auto rename = [](nlohmann::json& h, const std::string& prefix) {
    std::vector<std::string> names;
    for (const auto& [name, entry] : h.items())
      if (name.starts_with(prefix)) names.push_back(name);
    for (const std::string& name : names) {
      h["other." + name] = h[name];
      h.erase(name);
    }
  };
  const Run alone = edited([&](nlohmann::json& h, std::string&) {
    for (const char* prefix : {"y", "final_", "dx", "dweight."}) rename(h, prefix);
  });
  CHECK(alone.status == 0);
  CHECK(alone.output.ends_with("\n92 passed, 0 failed\n"));
  refused([&](auto& h) { rename(h, "dy"); }, "--backward needs a file with dy");
  refused([&](auto& h) { rename(h, "x"); }, "x is missing or has not the shape [B, T, hidden_size]");
  refused([&](auto& h) { rename(h, "weight.m_proj"); }, "weight.m_proj.weight [2, 24] is missing");
  refused([](auto& h) { h["weight.A_log"]["shape"] = {1, 2}; }, "weight.A_log has shape [1, 2], not [2]");
  refused(
      [](auto& h) {
        h["dx"]["shape"] = {42, 1, 24};
      },
      "dx has not the shape that x and the metadata call for");
  const auto metadata = [&](const char* key, const char* value, const std::string& why) {
    refused([&](auto& h) { h["__metadata__"][key] = value; }, why);
  };
  metadata("kind", "transformer", "is of an unknown kind, \"transformer\"");
  metadata("gate", "relu", "its gate, \"relu\", is not sigmoid or swish");
  metadata("use_short_conv", "yes", "its use_short_conv, \"yes\", is not True or False");
  metadata("num_heads", "2.5", "its num_heads, \"2.5\", is not an integer");
  metadata("tau_factor", "one", "its tau_factor, \"one\", is not a number");
  metadata("conv_size", "0", "config.conv_size = 0 is not > 0");
  refused([](auto& h) { h["__metadata__"].erase("norm_eps"); }, "its metadata have no norm_eps");
}
