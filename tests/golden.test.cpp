// Verified values (tests/data), and derivatives of the templated recurrence by complex step against the
// gradients there.
#include <complex>

#include "support/catch.hpp"
#include "support/golden.hpp"
#include "support/problem.hpp"

using namespace test;

namespace {

template <class Scalar>
double ceiling() {
  return std::is_same_v<Scalar, float> ? 3e-6 : 1e-13;
}

}  // namespace

TEMPLATE_TEST_CASE("golden values", "", float, double) {
  const auto files = golden_files("");
  REQUIRE(files.size() == 15);
  for (const auto& [path, file] : files) {
    const examples::Case c = examples::read_case(file);
    REQUIRE(!c.expected.o.absent());
    const auto check = [&](Options options) {
      options.allow_positive_log_gates = true;
      const Results<TestType> y = examples::run(c.problem.as<TestType>(), options);
      CHECK(examples::error_of(y.o, c.expected.o).rel_rms <= ceiling<TestType>());
      CHECK(examples::error_of(y.final_S, c.expected.final_S).rel_rms <= ceiling<TestType>());
      CHECK(examples::error_of(y.final_M, c.expected.final_M).rel_rms <= ceiling<TestType>());
    };
    INFO(path);
    check({});
    check(recurrent());
    for (const Index C : {1, 3, 16, 64, 128}) {
      INFO("chunk size " << C);
      check(chunk(C));
    }
  }
}

TEST_CASE("golden values in long double, as exact as they are") {
  for (const auto& [path, file] : golden_files("")) {
    const examples::Case c = examples::read_case(file);
    Options options = chunk(16);
    options.allow_positive_log_gates = true;
    INFO(path);
    CHECK(examples::error_of(examples::run(c.problem.as<long double>(), options).o, c.expected.o).rel_rms <=
          1e-13);
  }
}

// d loss / d x_i = Im loss(x + i h e_i) / h, exact to rounding since nothing is subtracted; h as small as one
// likes.
TEST_CASE("complex step through both forms gives the golden gradients") {
  using Complex = std::complex<double>;
  const double h = 1e-100;
  for (const std::string& file : {std::string(TEST_DATA_DIR "/grouped_heads_own_p.safetensors"),
                                  std::string(TEST_DATA_DIR "/resets.safetensors"),
                                  std::string(TEST_DATA_DIR "/packed_sequences.safetensors")}) {
    const safetensors::File golden = safetensors::read(file);
    const auto values = [&](const std::string& name) { return golden.tensors.at(name).as<double>(); };
    const auto dout = values("do"), dfinal_S = values("dfinal_S"), dfinal_M = values("dfinal_M");
    const Problem<double> x = examples::read_case(golden).problem;
    Random random(1);
    const auto check = [&](const std::string& name, Array<Complex> Problem<Complex>::*input,
                           const Options& options) {
      const auto gradient = values("d" + name);
      double difference = 0, total = 0;
      for (int sample = 0; sample < 12; ++sample) {
        Problem<Complex> z = x.as<Complex>();
        auto& entries = (z.*input).values;
        const std::size_t i = random.bits() % entries.size();
        entries[i] += Complex(0, h);
        const Results<Complex> y = examples::run(z, options);
        double loss = 0;  // its imaginary part
        for (std::size_t j = 0; j < dout.size(); ++j) loss += dout[j] * y.o.values[j].imag() / h;
        for (std::size_t j = 0; j < dfinal_S.size(); ++j)
          loss += (dfinal_S[j] * y.final_S.values[j].imag() + dfinal_M[j] * y.final_M.values[j].imag()) / h;
        difference = std::max(difference, std::abs(loss - gradient[i]));
        total = std::max(total, std::abs(gradient[i]));
      }
      INFO(file << " d" << name);
      CHECK(difference <= 1e-12 * std::max(total, 1e-3));
    };
    for (const Options& options : {recurrent(), chunk(16)}) {
      check("q", &Problem<Complex>::q, options);
      check("k", &Problem<Complex>::k, options);
      check("v", &Problem<Complex>::v, options);
      check("p", &Problem<Complex>::p, options);
      check("log_alpha", &Problem<Complex>::log_alpha, options);
      check("log_mu", &Problem<Complex>::log_mu, options);
      check("beta", &Problem<Complex>::beta, options);
      check("eta", &Problem<Complex>::eta, options);
      check("initial_S", &Problem<Complex>::initial_S, options);
      check("initial_M", &Problem<Complex>::initial_M, options);
    }
  }
}
