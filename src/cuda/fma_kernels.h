// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The general kernels by name: which text, which config, how many blocks. naive and simt take every
// problem; they differ in speed.
#pragma once

#include <vector>

#include "cuda/implementations.h"
#include "kernels/params.h"
#include "plan/simt.h"

namespace fulmen::cuda {

// For the tables of implementations.h.
std::vector<KernelLaunch> naive_launches(const Problem& problem, const Gpu& gpu);
std::vector<KernelLaunch> simt_launches(const Problem& problem, const Gpu& gpu);
void fma_run(const Call& call);  // of both

// What a forward or backward call launches, in order: for backward, a kernel for each gradient that
// is present (dK and dV share one). naive takes every problem.
std::vector<KernelLaunch> naive_forward(const AttentionParams& params);
std::vector<KernelLaunch> naive_backward(const AttentionParams& params);

// simt: the widest tiles that fit `shared_bytes` of a block. The backward pass has a workspace
// (plan/simt.h), which set_row_terms names. Throws Error kUnsupported where not even the narrowest
// do.
std::vector<KernelLaunch> simt_forward(const AttentionParams& params, std::size_t shared_bytes);
// adds_dq: as plan/simt.h says.
std::vector<KernelLaunch> simt_backward(const AttentionParams& params, std::size_t shared_bytes,
                                        bool adds_dq = false);
void set_row_terms(AttentionParams& params, u8* workspace);

// Kernels that CI compiles for every architecture: for each entry, a spec of each dtype; simt for
// head dimensions that between them use every tile.
std::vector<std::vector<KernelSpec>> naive_specs();
std::vector<std::vector<KernelSpec>> simt_specs(std::size_t shared_bytes);

}  // namespace fulmen::cuda
