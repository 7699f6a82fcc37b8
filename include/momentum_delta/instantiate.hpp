/// \file
/// The calls compiled once for a whole program: the kernels behind one take seconds to compile, in every
/// source file that makes it. In a header that those files include, for the types that they use,
///
///     MOMENTUM_DELTA_RULE(extern template, float, float)
///     MOMENTUM_DELTA_RULE(extern template, float, Eigen::bfloat16)
///     MOMENTUM_DELTA_SCAN(extern template, float, float)
///     MOMENTUM_DELTA_LAYER(extern template, float)
///
/// and in one source file the same with `template`. At global scope, Scalar and Storage as in Inputs.
/// All files need the same compiler options, above all the same instruction set.
#pragma once

#include "momentum_delta/momentum_delta.hpp"

/// forward(), backward() and step().
#define MOMENTUM_DELTA_RULE(template_, Scalar, Storage)                                                      \
  namespace momentum_delta {                                                                                 \
  template_ void forward<Scalar, Storage>(const Inputs<Scalar, Storage>&, const Outputs<Scalar, Storage>&,   \
                                          const Options&);                                                   \
  template_ void forward<Scalar, Storage>(const Inputs<Scalar, Storage>&, const Outputs<Scalar, Storage>&,   \
                                          Saved<Scalar>&, const Options&);                                   \
  template_ void backward<Scalar, Storage>(const Inputs<Scalar, Storage>&, const Saved<Scalar>&,             \
                                           const OutputGradients<Scalar, Storage>&,                          \
                                           const InputGradients<Scalar, Storage>&, const Options&);          \
  template_ void step<Scalar, Storage>(const Inputs<Scalar, Storage>&, StateView<Scalar>, StateView<Scalar>, \
                                       TokenView<Storage>, const Options&);                                  \
  }

/// scan_forward(), scan_backward() and scan_step().
#define MOMENTUM_DELTA_SCAN(template_, Scalar, Storage)                                                  \
  namespace momentum_delta {                                                                             \
  template_ void scan_forward<Scalar, Storage>(const ScanInputs<Scalar, Storage>&,                       \
                                               const ScanOutputs<Scalar, Storage>&, const ScanOptions&); \
  template_ void scan_forward<Scalar, Storage>(const ScanInputs<Scalar, Storage>&,                       \
                                               const ScanOutputs<Scalar, Storage>&, ScanSaved<Scalar>&,  \
                                               const ScanOptions&);                                      \
  template_ void scan_backward<Scalar, Storage>(const ScanInputs<Scalar, Storage>&,                      \
                                                const ScanSaved<Scalar>&,                                \
                                                const ScanOutputGradients<Scalar, Storage>&,             \
                                                const ScanInputGradients<Scalar, Storage>&,              \
                                                const ScanOptions&);                                     \
  template_ void scan_step<Scalar, Storage>(const ScanInputs<Scalar, Storage>&, ArrayView<Scalar, 3>,    \
                                            ArrayView<Storage, 3>, const ScanOptions&);                  \
  }

/// layer_forward(), layer_step() and layer_backward(). They make the rule's calls.
#define MOMENTUM_DELTA_LAYER(template_, Scalar)                                                             \
  namespace momentum_delta {                                                                                \
  template_ void layer_forward<Scalar>(const Layer<Scalar>&, TokenView<const Scalar>, TokenView<Scalar>,    \
                                       const LayerOptions<Scalar>&);                                        \
  template_ void layer_forward<Scalar>(const Layer<Scalar>&, TokenView<const Scalar>, TokenView<Scalar>,    \
                                       LayerSaved<Scalar>&, const LayerOptions<Scalar>&);                   \
  template_ void layer_step<Scalar>(const Layer<Scalar>&, TokenView<const Scalar>, TokenView<Scalar>,       \
                                    LayerCache<Scalar>&, LayerOptions<Scalar>);                             \
  template_ void layer_backward<Scalar>(const Layer<Scalar>&, TokenView<const Scalar>, LayerSaved<Scalar>&, \
                                        TokenView<const Scalar>, const LayerGradients<Scalar>&,             \
                                        const LayerOptions<Scalar>&);                                       \
  }
