/// \file
/// The momentum delta rule, exact for every log_mu in [-inf, 0]: start at batch.hpp, forward(), backward()
/// and step(). The layer around it: layer.hpp.
#pragma once

#include "momentum_delta/activations.hpp"
#include "momentum_delta/batch.hpp"
#include "momentum_delta/check.hpp"
#include "momentum_delta/chunk/backward.hpp"
#include "momentum_delta/chunk/forward.hpp"
#include "momentum_delta/decay_mask.hpp"
#include "momentum_delta/executor.hpp"
#include "momentum_delta/gates.hpp"
#include "momentum_delta/layer.hpp"
#include "momentum_delta/normalize.hpp"
#include "momentum_delta/recurrent/backward.hpp"
#include "momentum_delta/recurrent/forward.hpp"
#include "momentum_delta/recurrent/fused.hpp"
#include "momentum_delta/saved.hpp"
#include "momentum_delta/selective_scan.hpp"
#include "momentum_delta/sequence.hpp"
#include "momentum_delta/types.hpp"
#include "momentum_delta/views.hpp"
