// Heap use of a training step against T: forward with Saved, then backward, of one head in float, and of a
// selective scan of 16 channels with 16 states each.
//
//   momentum_delta_memory [T...]
//
// Counts what malloc, realloc and aligned_alloc give and free takes back (glibc), all that Eigen and operator
// new use. The caller's tensors exist before the count begins. Prints, for each T, the peak of the heap in
// between and what it grew by for each further token, in scalars; exits with 1 if that is not
// 2 K V / (chunk * interval), and V more if u is kept, or D N / chunk for the scan: less would mean that the
// count has missed something.
#include <malloc.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "../examples/kernels/kernels.hpp"

extern "C" void* __libc_malloc(std::size_t);
extern "C" void __libc_free(void*);
extern "C" void* __libc_realloc(void*, std::size_t);
extern "C" void* __libc_memalign(std::size_t, std::size_t);

namespace {

std::atomic<long> current{0}, peak{0};

void count(long bytes) {
  const long now = current += bytes;
  if (now > peak) peak = now;
}

}  // namespace

extern "C" void* malloc(std::size_t size) {
  void* memory = __libc_malloc(size);
  if (memory != nullptr) count(long(malloc_usable_size(memory)));
  return memory;
}
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t size) {
  void* memory = __libc_memalign(alignment, size);
  if (memory != nullptr) count(long(malloc_usable_size(memory)));
  return memory;
}
extern "C" void free(void* memory) {
  if (memory != nullptr) count(-long(malloc_usable_size(memory)));
  __libc_free(memory);
}
extern "C" void* realloc(void* memory, std::size_t size) {
  if (memory != nullptr) count(-long(malloc_usable_size(memory)));
  void* moved = __libc_realloc(memory, size);
  if (moved != nullptr) count(long(malloc_usable_size(moved)));
  return moved;
}

namespace {

namespace md = momentum_delta;
using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr md::Index K = 64, V = 64, chunk = 64;

// The peak of the heap above what the caller holds, in scalars.
double peak_of_step(md::Index T, md::Index interval, bool keep_u) {
  const Rows q = Rows::Random(T, K), k = q.rowwise().normalized(), v = Rows::Random(T, V),
             error = Rows::Random(T, V);
  const Eigen::VectorXf log_mu = Eigen::VectorXf::Constant(T, -0.5f);
  Rows o(T, V), dq(T, K), dk(T, K), dv(T, V);
  Eigen::VectorXf dlog_mu(T);
  const md::Inputs<float> x{.q = q, .k = k, .v = v, .log_mu = log_mu};
  const long before = current;
  peak = before;
  md::Saved<float> saved(interval, keep_u);
  md::forward(x, {.o = o}, saved, {.algorithm = md::Algorithm::chunk, .chunk_size = chunk});
  md::backward(x, saved, {.do_ = error}, {.dq = dq, .dk = dk, .dv = dv, .dlog_mu = dlog_mu});
  return double(peak - before) / sizeof(float);
}

constexpr md::Index channels = 16, states = 16;

double peak_of_scan(md::Index T) {
  const Rows u = Rows::Random(T, channels), delta = Rows::Random(T, channels), z = Rows::Random(T, channels),
             B = Rows::Random(T, states), C = Rows::Random(T, states), A = -Rows::Ones(channels, states);
  Rows out(T, channels), du(T, channels), ddelta(T, channels), dz(T, channels), dB(T, states), dC(T, states),
      dA(channels, states);
  const md::ScanInputs<float> x{.u = u, .delta = delta, .A = A, .B = B, .C = C, .z = z};
  const long before = current;
  peak = before;
  md::ScanSaved<float> saved;
  md::scan_forward(x, {.out = out}, saved, {.chunk_size = chunk});
  md::scan_backward(x, saved, {.dout = z},
                    {.du = du, .ddelta = ddelta, .dA = dA, .dB = dB, .dC = dC, .dz = dz});
  return double(peak - before) / sizeof(float);
}

// The last columns of a row. Large blocks are rounded up to pages of 1024 scalars: two of them here, three
// with u.
bool print_growth(double scalars, double last_scalars, md::Index T, md::Index last_T, double bound) {
  std::printf(" %12.0f", scalars * sizeof(float));
  if (last_T == 0) {
    std::printf("\n");
    return true;
  }
  const double slope = (scalars - last_scalars) / double(T - last_T);
  std::printf(" %22.2f %10.2f\n", slope, bound);
  return std::abs(slope - bound) * double(T - last_T) <= 3 * 1024;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<md::Index> lengths;
  for (int i = 1; i < argc; ++i) lengths.push_back(std::atoll(argv[i]));
  if (lengths.empty()) lengths = {1024, 16384, 262144};
  bool linear = true;
  std::printf("K %d, V %d, chunk %d\n%8s %6s %9s %12s %22s %10s\n", int(K), int(V), int(chunk), "interval",
              "keep_u", "T", "peak bytes", "scalars a further token", "expected");
  for (const md::Index interval : {1, 4, 16}) {
    for (const bool keep_u : {false, true}) {
      const double bound = 2.0 * K * V / double(chunk * interval) + (keep_u ? V : 0);
      double last_peak = 0;
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const double scalars = peak_of_step(lengths[i], interval, keep_u);
        std::printf("%8d %6s %9lld", int(interval), keep_u ? "yes" : "no",
                    static_cast<long long>(lengths[i]));
        linear &= print_growth(scalars, last_peak, lengths[i], i == 0 ? 0 : lengths[i - 1], bound);
        last_peak = scalars;
      }
    }
  }
  std::printf("\nselective scan, D %d, N %d, chunk %d\n%9s %12s %22s %10s\n", int(channels), int(states),
              int(chunk), "T", "peak bytes", "scalars a further token", "expected");
  if (argc == 1) lengths.push_back(1 << 20);
  double last_peak = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const double scalars = peak_of_scan(lengths[i]);
    std::printf("%9lld", static_cast<long long>(lengths[i]));
    linear &= print_growth(scalars, last_peak, lengths[i], i == 0 ? 0 : lengths[i - 1],
                           double(channels * states) / double(chunk));
    last_peak = scalars;
  }
  return linear ? 0 : 1;
}
