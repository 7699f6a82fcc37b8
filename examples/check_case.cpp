// Checks tensors dumped from another framework against this library's kernels.
//
//   check_case [--kernel recurrent|chunk|all] [--chunk N[,N...]] [--scalar float|double|all]
//              [--backward] [--max-error X] FILE...
//
// Each FILE is a .safetensors file: of the rule, in the layout of support/case_file.hpp (positive log gates
// are allowed), or, by its metadata "kind", of the layer (support/layer_case.hpp) or of the selective scan
// (support/scan_case.hpp).
// Prints one tab-separated line for each file, kernel, chunk, scalar and tensor,
//
//   file kernel chunk scalar tensor rel_rms max_rel
//
// (chunk is - for the recurrent kernel; Error in support/case_file.hpp defines the two measures), then a line
// "N passed, N failed". A line passes if its rel_rms is finite and at most X: 3e-6 for float and 1e-13 for
// double unless given. --backward also checks the gradients d* in the file, for the upstream gradients do,
// dfinal_S and dfinal_M that it has (an absent one is 0), with bounds of 1e-5 and 1e-12. Those of a scan are
// dout and dfinal_state, with the same bounds; that of a layer is dy, and its bounds are 1e-5 and 1e-11 for
// values and gradients. A file without any expected value, or without any expected gradient, is compared with
// the recurrence in double.
//
// Exit status: 0 if all passed, 1 if any failed, 2 if an argument or a file is unusable.
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "support/arguments.hpp"
#include "support/case_file.hpp"
#include "support/layer_case.hpp"
#include "support/scan_case.hpp"

using momentum_delta::Algorithm;
using momentum_delta::Index;
using namespace examples;

namespace {

struct Arguments {
  bool recurrent = true, chunk = true;
  std::vector<Index> chunks = {64};
  bool single = true, twice = true;  // float, double
  bool backward = false;
  std::optional<double> max_error;
  std::vector<std::string> files;
};

Index parse_chunk(const std::string& text) {
  const auto value = number<Index>(text);
  if (!value || *value < 1) throw UsageError("--chunk takes integers >= 1, not \"" + text + "\"");
  return *value;
}

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (!flag.starts_with("--")) {
      a.files.push_back(flag);
      continue;
    }
    if (flag == "--backward") {
      a.backward = true;
      continue;
    }
    if (flag != "--kernel" && flag != "--chunk" && flag != "--scalar" && flag != "--max-error")
      throw UsageError("unknown option " + flag);
    if (++i == argc) throw UsageError(flag + " needs a value");
    const std::string value = argv[i];
    if (flag == "--kernel") {
      if (value != "recurrent" && value != "chunk" && value != "all")
        throw UsageError("--kernel takes recurrent, chunk or all, not \"" + value + "\"");
      a.recurrent = value != "chunk";
      a.chunk = value != "recurrent";
    } else if (flag == "--chunk") {
      a.chunks.clear();
      for (std::size_t from = 0; from <= value.size();) {
        const std::size_t comma = std::min(value.find(',', from), value.size());
        a.chunks.push_back(parse_chunk(value.substr(from, comma - from)));
        from = comma + 1;
      }
    } else if (flag == "--scalar") {
      if (value != "float" && value != "double" && value != "all")
        throw UsageError("--scalar takes float, double or all, not \"" + value + "\"");
      a.single = value != "double";
      a.twice = value != "float";
    } else {
      a.max_error = number<double>(value);
      if (!a.max_error || !(*a.max_error >= 0))
        throw UsageError("--max-error takes a number >= 0, not \"" + value + "\"");
    }
  }
  if (a.files.empty()) throw UsageError("no file given");
  return a;
}

class Checker {
 public:
  int passed = 0, failed = 0;

  explicit Checker(const Arguments& arguments) : arguments_(arguments) {}

  void check(const std::string& path) {
    const safetensors::File file = safetensors::read(path);
    const std::string kind = kind_of(file);
    if (kind.empty())
      check_rule(path, read_case(file));
    else if (kind == layer_kind)
      check_layer(path, read_layer_case(file));
    else if (kind == scan_kind)
      check_scan(path, read_scan_case(file));
    else
      throw std::runtime_error("is of an unknown kind, \"" + kind + "\"");
  }

 private:
  static momentum_delta::Options options(Algorithm algorithm, std::optional<Index> chunk_size) {
    return {algorithm, chunk_size, /*allow_positive_log_gates=*/true};
  }

  // visit(kernel, options) for each form that is asked for.
  template <class Visit>
  void for_each_kernel(const Visit& visit) const {
    if (arguments_.recurrent) visit("recurrent\t-", options(Algorithm::recurrent, {}));
    if (!arguments_.chunk) return;
    for (const Index size : arguments_.chunks)
      visit("chunk\t" + std::to_string(size), options(Algorithm::chunk, size));
  }

  // The line of one tensor, if it is expected.
  template <class Scalar>
  void compare(const std::string& path, const std::string& kernel, const std::string& name,
               const Array<Scalar>& value, const Array<double>& expected, double bound) {
    if (expected.absent()) return;
    const Error e = error_of(value, expected);
    std::printf("%s\t%s\t%s\t%s\t%.3e\t%.3e\n", path.c_str(), kernel.c_str(),
                std::is_same_v<Scalar, float> ? "float" : "double", name.c_str(), e.rel_rms, e.max_rel);
    const bool pass = std::isfinite(e.rel_rms) && e.rel_rms <= arguments_.max_error.value_or(bound);
    ++(pass ? passed : failed);
  }

  void check_rule(const std::string& path, Case c) {
    if (c.expected.o.absent() && c.expected.final_S.absent() && c.expected.final_M.absent())
      c.expected = run(c.problem, options(Algorithm::recurrent, {}));
    if (arguments_.backward) {
      if (c.upstream.absent())
        throw std::runtime_error("--backward needs a file with do, dfinal_S or dfinal_M");
      bool given = false;
      Gradients<double>::for_each([&](const char*, auto get, auto) { given |= !get(c.gradients).absent(); });
      if (!given) c.gradients = run_backward(c.problem, c.upstream, options(Algorithm::recurrent, {}));
    }
    if (arguments_.single) check_rule_in<float>(path, c, 3e-6, 1e-5);
    if (arguments_.twice) check_rule_in<double>(path, c, 1e-13, 1e-12);
  }

  template <class Scalar>
  void check_rule_in(const std::string& path, const Case& c, double value_bound, double gradient_bound) {
    const Problem<Scalar> x = c.problem.as<Scalar>();
    for_each_kernel([&](const std::string& kernel, const momentum_delta::Options& options) {
      const Results<Scalar> y = run(x, options);
      compare(path, kernel, "o", y.o, c.expected.o, value_bound);
      compare(path, kernel, "final_S", y.final_S, c.expected.final_S, value_bound);
      compare(path, kernel, "final_M", y.final_M, c.expected.final_M, value_bound);
      if (!arguments_.backward) return;
      const Gradients<Scalar> dx = run_backward(x, c.upstream.as<Scalar>(), options);
      Gradients<double>::for_each([&](const char* name, auto get, auto) {
        compare(path, kernel, name, get(dx), get(c.gradients), gradient_bound);
      });
    });
  }

  void check_layer(const std::string& path, LayerCase c) {
    if (arguments_.backward && !c.tensors.contains("dy"))
      throw std::runtime_error("--backward needs a file with dy");
    const bool no_values = c.values.empty(), no_gradients = arguments_.backward && c.gradients.empty();
    if (no_values || no_gradients) {
      for (const auto& [name, tensor] :
           run_layer<double>(c, options(Algorithm::recurrent, {}), no_gradients)) {
        const bool gradient = name.starts_with("d");
        if (gradient ? no_gradients : no_values) (gradient ? c.gradients : c.values)[name] = tensor;
      }
    }
    if (arguments_.single) check_layer_in<float>(path, c, 1e-5);
    if (arguments_.twice) check_layer_in<double>(path, c, 1e-11);
  }

  template <class Scalar>
  void check_layer_in(const std::string& path, const LayerCase& c, double bound) {
    for_each_kernel([&](const std::string& kernel, const momentum_delta::Options& options) {
      const Named<Scalar> out = run_layer<Scalar>(c, options, arguments_.backward);
      for (const auto& [name, expected] : c.values)
        compare(path, kernel, name, out.at(name), expected, bound);
      if (!arguments_.backward) return;
      for (const auto& [name, expected] : c.gradients)
        compare(path, kernel, name, out.at(name), expected, bound);
    });
  }

  void check_scan(const std::string& path, ScanCase c) {
    if (c.expected.out.absent() && c.expected.final_state.absent())
      c.expected = run(c.problem, {.algorithm = Algorithm::recurrent});
    if (arguments_.backward) {
      if (c.upstream.absent()) throw std::runtime_error("--backward needs a file with dout or dfinal_state");
      bool given = false;
      ScanGradients<double>::for_each(
          [&](const char*, auto get, auto) { given |= !get(c.gradients).absent(); });
      if (!given) c.gradients = run_backward(c.problem, c.upstream, {.algorithm = Algorithm::recurrent});
    }
    if (arguments_.single) check_scan_in<float>(path, c, 3e-6, 1e-5);
    if (arguments_.twice) check_scan_in<double>(path, c, 1e-13, 1e-12);
  }

  template <class Scalar>
  void check_scan_in(const std::string& path, const ScanCase& c, double value_bound, double gradient_bound) {
    const ScanProblem<Scalar> x = c.problem.as<Scalar>();
    for_each_kernel([&](const std::string& kernel, const momentum_delta::Options& form) {
      const momentum_delta::ScanOptions options{.algorithm = form.algorithm, .chunk_size = form.chunk_size};
      const ScanResults<Scalar> y = run(x, options);
      compare(path, kernel, "out", y.out, c.expected.out, value_bound);
      compare(path, kernel, "final_state", y.final_state, c.expected.final_state, value_bound);
      if (!arguments_.backward) return;
      const ScanGradients<Scalar> dx = run_backward(x, c.upstream.as<Scalar>(), options);
      ScanGradients<double>::for_each([&](const char* name, auto get, auto) {
        compare(path, kernel, name, get(dx), get(c.gradients), gradient_bound);
      });
    });
  }

  const Arguments& arguments_;
};

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  try {
    arguments = parse(argc, argv);
  } catch (const UsageError& e) {
    std::fprintf(stderr,
                 "check_case: %s\nusage: check_case [--kernel recurrent|chunk|all] [--chunk N[,N...]] "
                 "[--scalar float|double|all] [--backward] [--max-error X] FILE...\n",
                 e.what());
    return 2;
  }
  Checker checker(arguments);
  bool unusable = false;
  for (const std::string& file : arguments.files) {
    try {
      checker.check(file);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "check_case: %s: %s\n", file.c_str(), e.what());
      unusable = true;
    }
  }
  std::printf("%d passed, %d failed\n", checker.passed, checker.failed);
  return unusable ? 2 : checker.failed > 0 ? 1 : 0;
}
