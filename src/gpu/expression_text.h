// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From the steps of a user's expression to the C++ text that kernels are compiled with: a
// definition of UserExpression (kernels/common/expression.cuh), a line for each step. Integers are
// of 32 bits where no value that a step can have needs more. Neither extents nor strides nor
// scalars stand in the text, so that another shape compiles nothing; whether all of them are of
// ordinary size does. Pure.
#pragma once

#include <string>

#include "core/problem.h"
#include "kernels/expression.h"

namespace fulmen::gpu {

// "" where the problem has no expression.
std::string expression_text(const Problem& problem);

// What kernels get beside their parameters. sums: of the gradients that are asked for, one array
// behind the other; null: none.
ExpressionParams expression_params(const Problem& problem, double* sums, FaultBytes* faults);

CaptureGradients capture_gradients(const Problem& problem, double* sums);

// How many there are.
i64 num_capture_sums(const Problem& problem);

}  // namespace fulmen::gpu
