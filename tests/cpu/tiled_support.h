// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Running one request on the tiled implementation, on poisoned memory.
#pragma once

#include "random_problem.h"

namespace fulmen::test {

// The workspace is all NaN and starts at an odd address.
void run_tiled(RandomProblem& random, const Request& request, int num_threads);

// The request with its outputs elsewhere, all NaN.
Request with_fresh_outputs(RandomProblem& random, const Request& request);

// The arrays that an operation writes.
std::vector<Array> outputs_of(Operation operation);

}  // namespace fulmen::test
