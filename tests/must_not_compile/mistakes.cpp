// One mistake at a time, chosen by a macro; without one this compiles.
#include <momentum_delta/momentum_delta.hpp>

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

void mistake(const Rows& q, const Rows& k, const Rows& v, Rows& o, const Eigen::MatrixXf& column_major) {
  momentum_delta::Inputs<float> x{.q = q, .k = k, .v = v};
  momentum_delta::Outputs<float> y{.o = o};
#if defined(COLUMN_MAJOR)
  x.q = column_major;
#elif defined(WRONG_SCALAR)
  const Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> wide = q.cast<double>();
  x.q = wide;
#elif defined(TEMPORARY)
  x.q = Rows(2 * q);
#elif defined(TEMPORARY_REF)
  x.q = Eigen::Ref<const Rows>(2 * q);
#elif defined(TEMPORARY_OFFSETS)
  x.cu_seqlens = std::vector<momentum_delta::Index>{0, q.rows()};
#elif defined(BUFFER)
  std::vector<float> buffer(100);
  x.log_mu = buffer;
#elif defined(POINTER)
  x.log_mu = q.data();
#elif defined(OTHER_VIEW)
  momentum_delta::StateView<float> state(o);
  x.q = state;
#elif defined(EXPRESSION)
  x.q = 2 * q;
#elif defined(CONST_OUTPUT)
  y.o = v;
#elif defined(INTEGER_SCALAR)
  momentum_delta::Inputs<int> z;
#elif defined(MATRIX_OF_CHANNELS)
  momentum_delta::ScanInputs<float> z{.D = q};
#elif defined(STORAGE_OF_DOUBLE)
  momentum_delta::Inputs<double, Eigen::bfloat16> z;
#endif
  momentum_delta::forward(x, y);
  static_cast<void>(column_major);
}
