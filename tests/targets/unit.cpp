// TARGET: the name of this unit.
#include "unit.hpp"

namespace {

md::Options in(Exchanged& e, md::Options options) {
  options.workspace = &e.workspace;
  options.executor = &e.pool;
  return options;
}

}  // namespace

#define STRING_OF(x) #x
#define NAME_OF(x) STRING_OF(x)

const Unit TARGET{
    .name = NAME_OF(TARGET),
    .tile_rows = md::detail::tile_rows,
    .code = reinterpret_cast<const void*>(&md::detail::load_rows<float, md::detail::RowsMap<const float>>),
    .forward = [](Exchanged& e, const md::Inputs<float>& x, const md::Outputs<float>& y,
                  md::Options options) { md::forward(x, y, e.saved, in(e, options)); },
    .backward = [](Exchanged& e, const md::Inputs<float>& x, const md::OutputGradients<float>& dy,
                   const md::InputGradients<float>& dx,
                   md::Options options) { md::backward(x, e.saved, dy, dx, in(e, options)); },
    .scan_forward =
        [](Exchanged& e, const md::ScanInputs<float>& x, const md::ScanOutputs<float>& y) {
          md::scan_forward(x, y, e.scan_saved, {.executor = &e.pool, .workspace = &e.workspace});
        },
    .scan_backward =
        [](Exchanged& e, const md::ScanInputs<float>& x, const md::ScanOutputGradients<float>& dy,
           const md::ScanInputGradients<float>& dx) {
          md::scan_backward(x, e.scan_saved, dy, dx, {.executor = &e.pool, .workspace = &e.workspace});
        },
};
