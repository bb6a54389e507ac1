// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The general implementations: kernels on CUDA cores, with an FmaConfig, given AttentionParams.
// Both take every option; they differ in speed. naive: one thread a row, every problem. The oracle
// on a GPU. simt: tiles, every problem whose narrowest tiles fit the shared memory of a block. It
// also serves sm80 and sm90 with gradients that they do not make. kernels/merge has one such
// kernel, with parameters of its own.
#pragma once

#include <optional>
#include <string>

#include "gpu/gpu_plan.h"
#include "kernels/params.h"
#include "kernels/simt/config.h"

namespace fulmen::gpu {

inline constexpr DType kFloatTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16,
                                        DType::kBFloat16};

// entry: "backward_naive_dq", which is defined in kernels/<file>.cuh.
KernelSpec fma_spec(const std::string& file, const std::string& entry, const FmaConfig& config);

// A kernel with one thread a task.
KernelLaunch fma_launch(const KernelSpec& spec, i64 num_tasks);

// A plan whose kernels all get AttentionParams.
class FmaPlan final : public GpuPlan {
 public:
  explicit FmaPlan(const Problem& problem);
  void run(const Call& call) const override;

  AttentionParams params;  // but for pointers
};

// Names the workspace of a backward pass of simt.
void set_row_terms(AttentionParams& params, u8* workspace);

PlanOrRefusal plan_naive(const Problem& problem, const Gpu& gpu);

// The kernels of a pass, in order: for backward, one for each gradient that is present (dK and dV
// share one).
// user: what there is of a user's expression; captures: whether gradients of what it reads are
// summed.
std::vector<KernelLaunch> naive_forward(const AttentionParams& params, UserTerms user = {});
std::vector<KernelLaunch> naive_backward(const AttentionParams& params, UserTerms user = {},
                                         bool captures = false);

// The end of a pass that summed such gradients, `count` numbers in all.
KernelLaunch store_captures(DType dtype, i64 count);

// What CI compiles for every architecture: for each entry, a spec of each dtype.
std::vector<std::vector<KernelSpec>> naive_specs();

PlanOrRefusal plan_simt(const Problem& problem, const Gpu& gpu);

// The tile of a pass: side, rows, columns and dims as kernels are compiled for them; the widest
// that fits `shared_bytes` of a block and has up to most_rows rows, or nothing where not even the
// narrowest does.
std::optional<FmaConfig> simt_config(DType dtype, i64 dim_qk, i64 dim_v, bool backward,
                                     size_t shared_bytes, i64 most_rows = 128);

// Why there is none for a problem; "" where there is one.
std::string simt_refusal(const Problem& problem, const Gpu& gpu);

// Whether the pass for dK and dV adds to dQ as well, by atomics: faster, and not equal bit for bit
// from run to run. Only where sums are made in dQ itself, so not for 16-bit numbers.
bool simt_adds_dq(const Problem& problem);

// What the backward pass keeps of `rows` query rows, over all batch entries and heads: four numbers
// each. set_row_terms tells the kernels where.
size_t simt_workspace_bytes(DType dtype, i64 rows);

// The kernels of a pass, in order, in the widest tiles that fit `shared_bytes` of a block. The
// backward pass makes the gradients that are present. Throws Error kUnsupported where not even the
// narrowest tiles fit.
std::vector<KernelLaunch> simt_forward(const AttentionParams& params, size_t shared_bytes,
                                       UserTerms user = {});
std::vector<KernelLaunch> simt_backward(const AttentionParams& params, size_t shared_bytes,
                                        bool adds_dq = false, UserTerms user = {},
                                        bool captures = false);

// What CI compiles for every architecture: for each entry, a spec of each dtype, for head
// dimensions that between them use every tile.
std::vector<std::vector<KernelSpec>> simt_specs(std::size_t shared_bytes);

}  // namespace fulmen::gpu
