// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a validated Problem to what the general kernels are given.
#pragma once

#include "core/problem.h"
#include "kernels/params.h"

namespace fulmen::cuda {

// Pointers and strides are those of the problem's arrays. rng: two int64 in device memory, or null
// for the problem's own seed and offset.
AttentionParams attention_params(const Problem& problem, const i64* rng = nullptr);

}  // namespace fulmen::cuda
