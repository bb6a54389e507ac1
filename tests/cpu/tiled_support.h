// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Running one request on the tiled implementation, on poisoned memory.
#pragma once

#include <functional>

#include "random_problem.h"

namespace fulmen::test {

// The workspace is all NaN and starts at an odd address.
void run_tiled(RandomProblem& random, const Request& request, int num_threads);

// The request with its outputs elsewhere, all NaN.
Request with_fresh_outputs(RandomProblem& random, const Request& request);

// Whether decoding of all heads of a token at once, and of each with its group alone, has the same
// bits of o, also where one head has an infinity and one a number below the normal ones.
bool has_bits_of_heads_alone(DType dtype, i64 group,
                             const std::function<void(RandomProblem&, const Request&)>& run);

// The arrays that an operation writes.
std::vector<Array> outputs_of(Operation operation);

}  // namespace fulmen::test
