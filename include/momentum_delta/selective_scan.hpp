/// \file
/// Mamba's selective scan: scan_forward() and scan_backward() over whole sequences, scan_step() for one token
/// of decoding. See selective_scan/inputs.hpp for the definition, shapes and ranges.
#pragma once

#include "momentum_delta/selective_scan/backward.hpp"
#include "momentum_delta/selective_scan/check.hpp"
#include "momentum_delta/selective_scan/forward.hpp"
#include "momentum_delta/selective_scan/inputs.hpp"
#include "momentum_delta/selective_scan/parameters.hpp"
#include "momentum_delta/selective_scan/saved.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

inline Index choose_chunk_size(const ScanOptions& options, const ScanSizes& s) {
  return std::clamp<Index>(options.chunk_size.value_or(64), 1, std::max<Index>(s.T, 1));
}

template <class Scalar, class Storage>
void scan_forward(const ScanInputs<Scalar, Storage>& x, const ScanOutputs<Scalar, Storage>& y,
                  const ScanOptions& options, const ChunkStates<Scalar>& record) {
  const ScanSizes s = sizes_of(x);
  const Index chunk_size = choose_chunk_size(options, s);
  if (options.algorithm == Algorithm::chunk && s.T > 0)
    scan_chunks(x, y, options, chunk_size, record);
  else
    scan_recurrent(x, y, options, chunk_size, record);
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail

namespace momentum_delta {
inline namespace MOMENTUM_DELTA_TARGET {

/// Computes y.out, and y.final_state if wanted, from x. Both algorithms give the same values up to rounding;
/// automatic is the recurrent form, which has half the chunk form's exponentials and does not need its memory
/// for a state a chunk. The chunk form is for more threads than there are panels of channels (a cache line of
/// them, of one sequence): its chunks are tasks of their own.
/// Throws std::invalid_argument, before anything is written, if a shape, stride or option does not fit, if a
/// delta, a delta_bias or their sum is not finite, if dt would be negative, if an A is positive or not a
/// number, or if an output shares memory with anything else.
template <class Scalar, class Storage>
void scan_forward(const ScanInputs<Scalar, Storage>& x,
                  const std::type_identity_t<ScanOutputs<Scalar, Storage>>& y,
                  const ScanOptions& options = {}) {
  const detail::Check check("scan_forward");
  detail::check_scan_forward(check, x, y, options);
  const detail::ScanSizes s = detail::sizes_of(x);
  if (options.algorithm == Algorithm::chunk)
    detail::check_scan_chunks(check, s, detail::choose_chunk_size(options, s));
  detail::scan_forward(x, y, options, {});
}

/// scan_forward(x, y, options), the same bits, that also fills `saved` for scan_backward(). Throws as that
/// does.
template <class Scalar, class Storage>
void scan_forward(const ScanInputs<Scalar, Storage>& x,
                  const std::type_identity_t<ScanOutputs<Scalar, Storage>>& y, ScanSaved<Scalar>& saved,
                  const ScanOptions& options = {}) {
  const detail::Check check("scan_forward");
  detail::check_scan_forward(check, x, y, options);
  const detail::ScanSizes s = detail::sizes_of(x);
  const Index chunk_size = detail::choose_chunk_size(options, s);
  detail::check_scan_chunks(check, s, chunk_size);
  detail::scan_forward(x, y, options, detail::ScanRecord<Scalar>::begin(saved, s, chunk_size));
  detail::ScanRecord<Scalar>::finish(saved, chunk_size);
}

/// Gradients dx of a loss by the inputs x, from dy, those by the outputs of scan_forward(x, y, saved): see
/// ScanInputGradients for what is assigned and what is added. x must hold the values that scan_forward() saw.
/// The chunk size is the one that `saved` was made with, and the algorithm is the same whatever the options
/// say (selective_scan/backward.hpp). The results are the same bits for any number of threads.
/// Throws std::invalid_argument as scan_forward() does, before anything is written, and if `saved` was not
/// filled by a forward pass of these shapes and options.chunk_size, if set, or if a gradient of an absent
/// input is asked for.
template <class Scalar, class Storage>
void scan_backward(const ScanInputs<Scalar, Storage>& x, const ScanSaved<Scalar>& saved,
                   const std::type_identity_t<ScanOutputGradients<Scalar, Storage>>& dy,
                   const std::type_identity_t<ScanInputGradients<Scalar, Storage>>& dx,
                   const ScanOptions& options = {}) {
  static_assert(std::is_floating_point_v<Scalar>, "momentum_delta: scan_backward() takes no complex Scalar");
  const detail::Check check("scan_backward");
  detail::check_scan_backward(check, x, dy, dx, options);
  const detail::ScanSizes s = detail::sizes_of(x);
  detail::ScanRecord<Scalar>::check(check, saved, s);
  if (options.chunk_size && detail::choose_chunk_size(options, s) != saved.chunk_size())
    check.fail("options.chunk_size = ", *options.chunk_size, ", but saved was made with ",
               saved.chunk_size());
  detail::scan_gradients(x, detail::ScanRecord<Scalar>::states(saved), saved.chunk_size(), dy, dx, options);
}

/// One token (T = 1) of B sequences: state, [B, D, N], is updated in place and out, [B, 1, D], is assigned.
/// Throws std::invalid_argument as scan_forward() does, and if x has not exactly one token, or an initial
/// state (the state is an argument), or if options ask for the chunk form or set a chunk size.
template <class Scalar, class Storage>
void scan_step(const ScanInputs<Scalar, Storage>& x, std::type_identity_t<ArrayView<Scalar, 3>> state,
               std::type_identity_t<ArrayView<Storage, 3>> out, const ScanOptions& options = {}) {
  detail::check_scan_step(detail::Check("scan_step"), x, state, out, options);
  ScanInputs<Scalar, Storage> from_state = x;
  from_state.initial_state = state;
  detail::scan_forward(from_state, {.out = out, .final_state = state}, options, {});
}

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta
