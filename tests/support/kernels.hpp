// The library's calls in float and double, which most tests make: compiled once, in kernels_float.cpp and
// kernels_double.cpp, not in every test program.
#pragma once

#include <momentum_delta/momentum_delta.hpp>

#define TEST_RULE_KERNELS(template_, S, Storage)                                                             \
  namespace momentum_delta {                                                                                 \
  template_ void forward<S, Storage>(const Inputs<S, Storage>&, const Outputs<S, Storage>&, const Options&); \
  template_ void forward<S, Storage>(const Inputs<S, Storage>&, const Outputs<S, Storage>&, Saved<S>&,       \
                                     const Options&);                                                        \
  template_ void backward<S, Storage>(const Inputs<S, Storage>&, const Saved<S>&,                            \
                                      const OutputGradients<S, Storage>&, const InputGradients<S, Storage>&, \
                                      const Options&);                                                       \
  template_ void step<S, Storage>(const Inputs<S, Storage>&, StateView<S>, StateView<S>, TokenView<Storage>, \
                                  const Options&);                                                           \
  }
#define TEST_SCAN_KERNELS(template_, S)                                                                     \
  namespace momentum_delta {                                                                                \
  template_ void scan_forward<S, S>(const ScanInputs<S, S>&, const ScanOutputs<S, S>&, const ScanOptions&); \
  template_ void scan_forward<S, S>(const ScanInputs<S, S>&, const ScanOutputs<S, S>&, ScanSaved<S>&,       \
                                    const ScanOptions&);                                                    \
  template_ void scan_backward<S, S>(const ScanInputs<S, S>&, const ScanSaved<S>&,                          \
                                     const ScanOutputGradients<S, S>&, const ScanInputGradients<S, S>&,     \
                                     const ScanOptions&);                                                   \
  }
#define TEST_LAYER_KERNELS(template_, S)                                                                    \
  namespace momentum_delta {                                                                                \
  template_ void layer_forward<S>(const Layer<S>&, TokenView<const S>, TokenView<S>,                        \
                                  const LayerOptions<S>&);                                                  \
  template_ void layer_forward<S>(const Layer<S>&, TokenView<const S>, TokenView<S>, LayerSaved<S>&,        \
                                  const LayerOptions<S>&);                                                  \
  template_ void layer_step<S>(const Layer<S>&, TokenView<const S>, TokenView<S>, LayerCache<S>&,           \
                               LayerOptions<S>);                                                            \
  template_ void layer_backward<S>(const Layer<S>&, TokenView<const S>, LayerSaved<S>&, TokenView<const S>, \
                                   const LayerGradients<S>&, const LayerOptions<S>&);                       \
  }
#define TEST_KERNELS(template_, S)   \
  TEST_RULE_KERNELS(template_, S, S) \
  TEST_SCAN_KERNELS(template_, S)    \
  TEST_LAYER_KERNELS(template_, S)

TEST_KERNELS(extern template, float)
TEST_KERNELS(extern template, double)
