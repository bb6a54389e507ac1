// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_merge of arrays on a GPU: one small kernel, compiled and kept as all others are.
#pragma once

#include <vector>

#include "core/merge_problem.h"
#include "gpu/jit/kernel_spec.h"
#include "kernels/merge/params.h"

namespace fulmen::gpu {

// The number of the device that holds the arrays of a merge, by the first of them that has
// elements; -1: host memory.
int device_of(const MergeProblem& problem);

// problem: of validate_merge. Throws Error, kUnsupported beyond MergeParams::kMaxParts.
void merge(const MergeProblem& problem, int ordinal, void* stream);

// What the kernel is launched with.
MergeParams merge_params(const MergeProblem& problem);

// The kernel for arithmetic in float32 and in float64: what CI compiles.
std::vector<KernelSpec> merge_specs();

}  // namespace fulmen::gpu
