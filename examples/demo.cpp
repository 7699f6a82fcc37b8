// The published chunk form of the momentum delta rule against this library's, over the momentum decay mu.
//
//   demo                a synthetic experiment: B 2, T 128, H 2, K = V = 16
//   demo FILE...        a row for the tensors of each .safetensors file
//   demo --figure FILE  draws the synthetic experiment over log_mu, as an SVG file
//
// support/case_file.hpp says how a file of tensors is laid out.
// Every number is the relative RMS error of o in float against the recurrence in double.
#include <cstdio>
#include <string>
#include <vector>

#include "support/case_file.hpp"
#include "support/chart.hpp"
#include "support/log_domain_form.hpp"
#include "support/random.hpp"

using momentum_delta::Algorithm;
using momentum_delta::Index;
using namespace examples;

namespace {

const std::vector<Index> chunk_sizes = {8, 16, 64, 128};

double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

enum class Gates { constant_mu, per_token };

// Normalised k, p = k times alpha, beta uniform in [0, 1), eta 1; alpha 0.99 and the given mu, or gates per
// token.
Problem<double> experiment(Gates gates, double mu) {
  const Index B = 2, T = 128, H = 2, K = 16, V = 16;
  Random random(1);
  const auto normal = [&](Index D) {
    Array<double> x = zeros<double>({B, T, H, D});
    for (double& value : x.values) value = random.normal();
    return x;
  };
  Problem<double> x;
  x.q = normal(K);
  x.k = normal(K);
  x.v = normal(V);
  x.log_alpha = x.log_mu = x.beta = x.eta = zeros<double>({B, T, H});
  for (std::size_t i = 0; i < x.beta.values.size(); ++i) {
    const bool constant = gates == Gates::constant_mu;
    x.log_alpha.values[i] = constant ? std::log(0.99) : -0.1 * softplus(random.normal());
    x.log_mu.values[i] = constant ? std::log(mu) : -softplus(random.normal());
    x.beta.values[i] = random.uniform();
    x.eta.values[i] = 1;
  }
  x.p = x.k;
  for (std::size_t i = 0; i < x.beta.values.size(); ++i) {
    double* k = x.k.values.data() + i * std::size_t(K);
    double norm = 0;
    for (Index d = 0; d < K; ++d) norm += k[d] * k[d];
    for (Index d = 0; d < K; ++d) {
      k[d] /= std::sqrt(norm);
      x.p.values[i * std::size_t(K) + std::size_t(d)] = std::exp(x.log_alpha.values[i]) * k[d];
    }
  }
  return x.as<float>().as<double>();  // both precisions see the same numbers
}

void print_header(const char* first) {
  std::printf("\n%-22s %10s |", "", "recurrence");
  std::printf(" %-43s | %-43s\n%-22s %10s |", "chunk form of this library, chunk size",
              "published log-domain form, chunk size", first, "float");
  for (int form = 0; form < 2; ++form) {
    for (const Index size : chunk_sizes) std::printf(" %10lld", static_cast<long long>(size));
    std::printf("%s", form == 0 ? " |" : "\n");
  }
}

struct Errors {
  double recurrence;
  std::vector<double> ours, published;  // for each chunk size
};

Errors errors_of(const Problem<double>& x) {
  const bool grow = true;  // a file may hold positive log gates
  const Array<double> expected =
      run(x, {.algorithm = Algorithm::recurrent, .chunk_size = {}, .allow_positive_log_gates = grow}).o;
  const Problem<float> y = x.as<float>();
  const auto error = [&](const Results<float>& results) { return error_of(results.o, expected).rel_rms; };
  Errors e{error(run(y, {.algorithm = Algorithm::recurrent, .allow_positive_log_gates = grow})), {}, {}};
  for (const Index size : chunk_sizes) {
    e.ours.push_back(error(run(y, momentum_delta::Options{Algorithm::chunk, size, grow})));
    e.published.push_back(error(log_domain_form(y, size)));
  }
  return e;
}

void print_row(const std::string& name, const Problem<double>& x) {
  const auto print = [](double e) {
    std::isnan(e) ? std::printf(" %10s", "NaN") : std::printf(" %10.1e", e);
  };
  const Errors errors = errors_of(x);
  std::printf("%-22s", name.c_str());
  print(errors.recurrence);
  for (const auto* form : {&errors.ours, &errors.published}) {
    std::printf(" |");
    for (const double e : *form) print(e);
  }
  std::printf("\n");
}

void draw(const std::string& path) {
  Chart chart{.title = "Error of o in float, by chunk size (a line that ends has gone to NaN)",
              .x_label = "log_mu",
              .y_label = "relative RMS error",
              .series = {},
              .log10_y = true,
              .names = Names::beside,
              .y_min = 1e-8,
              .y_max = 10};
  const char* const reds[] = {"#fcae91", "#fb6a4a", "#de2d26", "#a50f15"};
  const char* const blues[] = {"#9ecae1", "#6baed6", "#3182bd", "#08519c"};
  for (std::size_t i = 0; i < chunk_sizes.size(); ++i)
    chart.series.push_back({"published, " + std::to_string(chunk_sizes[i]), {}, {}, reds[i]});
  for (std::size_t i = 0; i < chunk_sizes.size(); ++i)
    chart.series.push_back({"ours, " + std::to_string(chunk_sizes[i]), {}, {}, blues[i]});
  chart.series.push_back({"recurrence", {}, {}, "#000000"});
  for (const double log_mu :
       {-5., -4., -3., -2.5, -2., -1.5, -1., -0.7, -0.5, -0.35, -0.2, -0.1, -0.05, 0.}) {
    const Errors errors = errors_of(experiment(Gates::constant_mu, std::exp(log_mu)));
    auto series = chart.series.begin();
    const auto add = [&](double e) { series->x.push_back(log_mu), (series++)->y.push_back(e); };
    for (const double e : errors.published) add(e);
    for (const double e : errors.ours) add(e);
    add(errors.recurrence);
  }
  write_chart(path, chart);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string("--figure") == argv[1]) {
    try {
      draw(argv[2]);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "demo: %s\n", e.what());
      return 2;
    }
    return 0;
  }
  std::printf("Relative RMS error of o, float against the recurrence in double.\n");
  if (argc == 1) {
    print_header("mu");
    for (const double mu : {1., 0.95, 0.9, 0.8, 0.7, 0.5, 0.135, 0.01, 0.}) {
      char name[32];
      std::snprintf(name, sizeof name, "%g", mu);
      print_row(name, experiment(Gates::constant_mu, mu));
    }
    print_row("per token", experiment(Gates::per_token, 0));
    return 0;
  }
  print_header("file");
  for (int i = 1; i < argc; ++i) {
    const std::string path = argv[i];
    try {
      print_row(std::filesystem::path(path).stem().string().substr(0, 22),
                read_case(safetensors::read(path)).problem);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "demo: %s: %s\n", path.c_str(), e.what());
      return 2;
    }
  }
}
