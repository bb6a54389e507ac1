// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of validation that looks at options alone.
#pragma once

#include "core/problem.h"

namespace fulmen {

// Checks the options and fills what follows from them into a problem whose sizes are known. Throws
// Error with one sentence.
void apply_options(Problem& problem, const Options& options, const Experiment& experiment);

}  // namespace fulmen
