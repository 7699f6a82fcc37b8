#pragma once

namespace bench {

// Registers scan/forward/.. and scan/training/..
void add_scans();

}  // namespace bench
