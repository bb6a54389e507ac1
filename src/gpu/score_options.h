// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a problem to what kernels are compiled to know of its scores and masks, and from that to the
// end of a kernel's name. Pure.
#pragma once

#include <string>

#include "core/problem.h"
#include "kernels/score_options.h"

namespace fulmen::gpu {

// Every option that the problem has. A family whose kernels look one up at run time, or have no
// need of it, sets it back, so that fewer kernels are compiled.
ScoreOptions score_options_of(const Problem& problem);

// "_right_bias_float32_softcap": every option that is on.
std::string name_suffix(const ScoreOptions& score);

}  // namespace fulmen::gpu
