// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The simt implementation as the run time sees it: tiles on the ordinary arithmetic units, every
// problem whose tiles fit. It also serves sm80 and sm90 with gradients that they do not make.
#pragma once

#include <vector>

#include "gpu/implementations.h"
#include "gpu/simt/plan.h"
#include "kernels/params.h"

namespace fulmen::gpu {

// For the table of implementations.h; fma_run launches them.
std::vector<KernelLaunch> simt_launches(const Problem& problem, const Gpu& gpu);

// What a call launches, in order, in the widest tiles that fit `shared_bytes` of a block. The
// backward pass makes the gradients that are present and has a workspace (gpu/simt/plan.h), which
// set_row_terms (fma.h) names; adds_dq: as gpu/simt/plan.h says. Throws Error kUnsupported where
// not even the narrowest tiles fit.
std::vector<KernelLaunch> simt_forward(const AttentionParams& params, std::size_t shared_bytes);
std::vector<KernelLaunch> simt_backward(const AttentionParams& params, std::size_t shared_bytes,
                                        bool adds_dq = false);

// What CI compiles for every architecture: for each entry, a spec of each dtype, for head
// dimensions that between them use every tile.
std::vector<std::vector<KernelSpec>> simt_specs(std::size_t shared_bytes);

}  // namespace fulmen::gpu
