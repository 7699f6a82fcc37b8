/// \file
/// What a forward scan keeps for the backward pass: the state at chunk boundaries, never a state per token.
#pragma once

#include "momentum_delta/check.hpp"
#include "momentum_delta/selective_scan/panel.hpp"

namespace momentum_delta {

namespace detail {

template <class Scalar>
struct ScanRecord;

}  // namespace detail

/// Filled by scan_forward(x, y, saved, options) and read by scan_backward(x, saved, ...), which must see the
/// same x. It can be used again, for any shape. It holds N scalars (rounded up to 4) for each channel and
/// chunk; channels are rounded up to whole cache lines. The backward pass rebuilds the rest chunk by chunk.
template <class Scalar>
class ScanSaved {
 public:
  bool empty() const { return chunk_size_ == 0; }   ///< did no forward pass fill it?
  Index chunk_size() const { return chunk_size_; }  ///< of the pass that filled it; 0: none did

 private:
  friend struct detail::ScanRecord<Scalar>;

  Index chunk_size_ = 0;
  detail::ScanSizes sizes_{};
  detail::Memory states_;  // for each sequence, panel and chunk: the state before it, Np x W
};

namespace detail {

inline Index chunks_of(Index T, Index chunk_size) {
  return T / chunk_size + (T % chunk_size != 0);
}

// The states before the chunks of every panel, wherever they are kept.
template <class Scalar>
struct ChunkStates {
  Scalar* data = nullptr;
  Index chunks = 0, size = 0;  // size: of one state, Np W

  // task: of batch b and panel p, b panels + p
  Scalar* at(Index task, Index chunk) const { return data + (task * chunks + chunk) * size; }

  static Index count(const ScanSizes& s, Index chunk_size) {
    return s.B * ScanPanels<Scalar>(s).count() * chunks_of(s.T, chunk_size) * padded_states(s.N) *
           panel_width<Scalar>;
  }
};

template <class Scalar>
struct ScanRecord {
  // Makes room for a forward pass in chunks of chunk_size; what was held before is lost.
  static ChunkStates<Scalar> begin(ScanSaved<Scalar>& saved, const ScanSizes& s, Index chunk_size) {
    saved.chunk_size_ = 0;
    saved.sizes_ = s;
    saved.states_.reserve(std::size_t(ChunkStates<Scalar>::count(s, chunk_size)) * sizeof(Scalar));
    return states(saved, s, chunk_size);
  }
  static void finish(ScanSaved<Scalar>& saved, Index chunk_size) { saved.chunk_size_ = chunk_size; }

  static ChunkStates<Scalar> states(const ScanSaved<Scalar>& saved) {
    return states(saved, saved.sizes_, saved.chunk_size_);
  }

  static void check(const Check& check, const ScanSaved<Scalar>& saved, const ScanSizes& is) {
    if (saved.empty()) check.fail("saved holds no forward pass");
    const ScanSizes& was = saved.sizes_;
    const auto same = [&](const char* name, Index a, Index b) {
      if (a != b) check.fail("saved is of a forward pass with ", name, " = ", a, ", but x has ", b);
    };
    same("B", was.B, is.B);
    same("T", was.T, is.T);
    same("D", was.D, is.D);
    same("G", was.G, is.G);
    same("N", was.N, is.N);
  }

 private:
  static ChunkStates<Scalar> states(const ScanSaved<Scalar>& saved, const ScanSizes& s, Index chunk_size) {
    return {reinterpret_cast<Scalar*>(saved.states_.get()), chunks_of(s.T, chunk_size),
            padded_states(s.N) * panel_width<Scalar>};
  }
};

}  // namespace detail
}  // namespace momentum_delta
