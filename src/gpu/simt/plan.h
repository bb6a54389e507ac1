// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The simt implementation as plans see it: every problem whose narrowest tiles fit the shared
// memory of a block. Which tile a head dimension gets is decided here; src/gpu/simt/run.cpp
// compiles for it. Pure.
#pragma once

#include <optional>

#include "gpu/gpu_implementations.h"
#include "kernels/common/fma_config.h"

namespace fulmen {

std::string simt_refusal(const Problem& problem, const Gpu& gpu);
GpuNeeds simt_needs(const Problem& problem, const Gpu& gpu);

// The tile of a pass: side, rows, columns and dims as kernels are compiled for them; the widest
// that fits `shared_bytes` of a block, or nothing where not even the narrowest does.
std::optional<FmaConfig> simt_config(DType dtype, i64 dim_qk, i64 dim_v, bool backward,
                                     size_t shared_bytes);

// Whether the pass for dK and dV adds to dQ as well, by atomics: faster, and not equal bit for bit
// from run to run. Only where sums are made in dQ itself, so not for 16-bit numbers.
bool simt_adds_dq(const Problem& problem);

// What the backward pass keeps of `rows` query rows, over all batch entries and heads: four numbers
// each.
size_t simt_workspace_bytes(DType dtype, i64 rows);

}  // namespace fulmen
