// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Scores and masks of a user's, drawn from a seed: texts over all of the language, smooth enough
// that float32 and float64 agree on which branch is taken, with the arrays that they read.
#pragma once

#include "random_problem.h"

namespace fulmen::test {

// The call with a drawn score, mask or both. Arrays that it reads are floating-point tables, fewer
// than their indices reach, and integers.
Request with_expression(RandomProblem& random, const Request& forward);

// The call, by chance with rows, or rows and keys, in up to three segments of drawn positions; one
// over caches or with lists of blocks as it is.
Request with_segments(RandomProblem& random, const Request& given);

// Asks for the gradients of all floating-point arrays that an expression reads; whether it reads
// any.
bool add_capture_gradients(RandomProblem& random, Request& backward);

// The texts of the call's expression.
std::string expression_text(const Request& request);

}  // namespace fulmen::test
