// The library's calls in float with a 16-bit storage, compiled once: see ../support/kernels.hpp.
#pragma once

#include <momentum_delta/momentum_delta.hpp>

#define FUZZ_KERNELS(template_, Storage)                                                                 \
  namespace momentum_delta {                                                                             \
  template_ void forward<float, Storage>(const Inputs<float, Storage>&, const Outputs<float, Storage>&,  \
                                         const Options&);                                                \
  template_ void forward<float, Storage>(const Inputs<float, Storage>&, const Outputs<float, Storage>&,  \
                                         Saved<float>&, const Options&);                                 \
  template_ void backward<float, Storage>(const Inputs<float, Storage>&, const Saved<float>&,            \
                                          const OutputGradients<float, Storage>&,                        \
                                          const InputGradients<float, Storage>&, const Options&);        \
  template_ void step<float, Storage>(const Inputs<float, Storage>&, StateView<float>, StateView<float>, \
                                      TokenView<Storage>, const Options&);                               \
  }

FUZZ_KERNELS(extern template, Eigen::bfloat16)
FUZZ_KERNELS(extern template, Eigen::half)
