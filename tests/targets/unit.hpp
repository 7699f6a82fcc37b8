// What each translation unit of the program offers, in a namespace of its own: unit.cpp, compiled for one
// instruction set after the other.
#pragma once

#include <momentum_delta/momentum_delta.hpp>

namespace md = momentum_delta;

// What one unit fills and another reads.
struct Exchanged {
  md::Workspace workspace;
  md::ThreadPool pool{2};
  md::Saved<float> saved{2, true};
  md::ScanSaved<float> scan_saved;
};

struct Unit {
  const char* name;
  int tile_rows;  // of the kernels that it runs
  const void* code;
  void (*forward)(Exchanged&, const md::Inputs<float>&, const md::Outputs<float>&, md::Options);
  void (*backward)(Exchanged&, const md::Inputs<float>&, const md::OutputGradients<float>&,
                   const md::InputGradients<float>&, md::Options);
  void (*scan_forward)(Exchanged&, const md::ScanInputs<float>&, const md::ScanOutputs<float>&);
  void (*scan_backward)(Exchanged&, const md::ScanInputs<float>&, const md::ScanOutputGradients<float>&,
                        const md::ScanInputGradients<float>&);
};

extern const Unit baseline, avx2, avx512;
