// One program of units compiled for several instruction sets: each runs its own code, whatever the order they
// are linked in, and what one of them fills another can read.
#include "../support/catch.hpp"
#include "../support/scan.hpp"
#include "unit.hpp"

using namespace test;

namespace {

const Unit* const units[] = {&baseline, &avx2, &avx512};

}  // namespace

TEST_CASE("every unit has code of its own") {
  for (const Unit* a : units)
    for (const Unit* b : units) CHECK((a->code == b->code) == (a == b));
  CHECK(baseline.tile_rows == 4);
  CHECK(avx512.tile_rows == 8);
}

TEST_CASE("what one unit computes and keeps, another continues from") {
  const Problem<double> x = random_problem(1, {.B = 2, .T = 70, .HK = 1, .HV = 2, .K = 21, .V = 37});
  const Upstream<double> dy = random_upstream(1, x);
  const Results<long double> y = oracle(x);
  const Gradients<long double> dx = oracle_backward(x, dy);
  const Problem<float> xs = x.as<float>();
  const Upstream<float> dys = dy.as<float>();
  Exchanged exchanged;
  for (const Algorithm algorithm : {Algorithm::recurrent, Algorithm::chunk}) {
    const Options options{.algorithm = algorithm, .chunk_size = 16};
    for (const Unit* first : units) {
      for (const Unit* second : units) {
        INFO("algorithm " << int(algorithm) << ", " << first->name << " forward, " << second->name
                          << " backward");
        Results<float> ys{examples::unwritten<float>(x.v.shape), examples::unwritten<float>(x.state_shape()),
                          examples::unwritten<float>(x.state_shape())};
        first->forward(exchanged, xs.inputs(), ys.outputs(), options);
        CHECK(rel_rms(ys.o, y.o) <= 3e-6);
        CHECK(rel_rms(ys.final_S, y.final_S) <= 3e-6);
        CHECK(rel_rms(ys.final_M, y.final_M) <= 3e-6);
        Gradients<float> dxs;
        Gradients<float>::for_each(
            [&](const char*, auto get, auto) { get(dxs) = examples::unwritten<float>(get(dx).shape); });
        second->backward(exchanged, xs.inputs(), dys.views(), dxs.views(), options);
        Gradients<float>::for_each([&](const char* name, auto get, auto) {
          INFO(name);
          CHECK(rel_rms(get(dxs), get(dx)) <= 1e-5);
        });
      }
    }
  }
}

TEST_CASE("the selective scan of one unit, its gradients by another") {
  const ScanProblem<double> x = random_scan(2, {.B = 2, .T = 70, .D = 38, .G = 2, .N = 5});
  const ScanUpstream<double> dy = random_upstream(2, x);
  const ScanResults<long double> y = oracle(x);
  const ScanGradients<long double> dx = oracle_backward(x, dy);
  const ScanProblem<float> xs = x.as<float>();
  const ScanUpstream<float> dys = dy.as<float>();
  Exchanged exchanged;
  for (const Unit* first : units) {
    for (const Unit* second : units) {
      INFO(first->name << " forward, " << second->name << " backward");
      ScanResults<float> ys{examples::unwritten<float>(x.u.shape),
                            examples::unwritten<float>(x.state_shape())};
      first->scan_forward(exchanged, xs.inputs(), ys.outputs());
      CHECK(rel_rms(ys.out, y.out) <= 3e-6);
      CHECK(rel_rms(ys.final_state, y.final_state) <= 3e-6);
      ScanGradients<float> dxs;
      ScanGradients<float>::for_each(
          [&](const std::string&, auto get, auto) { get(dxs) = examples::unwritten<float>(get(dx).shape); });
      second->scan_backward(exchanged, xs.inputs(), dys.views(), dxs.views());
      ScanGradients<float>::for_each([&](const std::string& name, auto get, auto) {
        INFO(name);
        CHECK(rel_rms(get(dxs), get(dx)) <= 1e-5);
      });
    }
  }
}
