// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the GPU backend offers to the C ABI: plan a request, run a plan, do both at once. Requests
// have their device resolved (driver/device.h). Streams are void*, as in fulmen.h. Thread safe.
//
// And fulmen_merge, fulmen_append_kv, fulmen_rotary, fulmen_quantise and fulmen_mla_indexer of
// arrays on a GPU: a small kernel or a few each, compiled and kept as all others are.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/append.h"
#include "core/indexer.h"
#include "core/quantisation.h"
#include "core/validate.h"
#include "gpu/implementations.h"
#include "gpu/jit/kernel_spec.h"
#include "kernels/append/config.h"
#include "kernels/append/params.h"
#include "kernels/indexer/config.h"
#include "kernels/indexer/params.h"
#include "kernels/merge/params.h"
#include "kernels/quantise/config.h"

namespace fulmen::gpu {

// Compiles and loads all that runs of the plan will launch.
std::shared_ptr<const PreparedPlan> make_plan(const Request& request);

// Enqueues a run. problem: the plan's, with the arrays of this run. workspace: at least
// plan.workspace_bytes bytes on the device, any alignment and contents. Allocates, compiles and
// waits for nothing.
void run(const PreparedPlan& plan, const Problem& problem, void* workspace, void* stream);

// Plans where no call like this one came before, and runs; workspace comes from the stream's memory
// pool. space: what resolve_device returned.
void run_once(const Request& request, const MemorySpace& space, void* stream);

// Forgets and removes every compiled kernel.
void clear_cache();

// The faults of a device since the last call, as bits of Fault.
u32 take_faults(int device);

// The JSON object that fulmen_gpu_info documents.
std::string gpu_info();

// The number of the device that holds the arrays of a merge, by the first of them that has
// elements; -1: host memory.
int device_of(const MergeProblem& problem);

// problem: of validate_merge. Throws Error, kUnsupported beyond MergeParams::kMaxParts.
void merge(const MergeProblem& problem, int ordinal, void* stream);

// What the kernel is launched with.
MergeParams merge_params(const MergeProblem& problem);

// The kernel for arithmetic in float32 and in float64: what CI compiles.
std::vector<KernelSpec> merge_specs();

// Likewise of an append or a rotary embedding. problem: of validate_append.
int device_of(const AppendProblem& problem);
void append(const AppendProblem& problem, int ordinal, void* stream);

// Which of the kernels it takes, and what that is launched with; its blocks.
AppendConfig append_config(const AppendProblem& problem);
AppendParams append_params(const AppendProblem& problem, const AppendConfig& config,
                           FaultBytes* faults = nullptr);
i64 num_blocks(const AppendParams& params);

// One kernel of each dtype and rotation, in vectors and one element at a time.
std::vector<KernelSpec> append_specs();

// Every kernel that an append may take whose rows are of one dtype and whose caches are of another,
// quantised one, or of the same.
std::vector<KernelSpec> append_specs_of(DType dtype, DType cache_dtype);

// Likewise of an indexer. problem: of validate_indexer. Throws Error, kUnsupported beyond
// kMostChosen.
int device_of(const IndexerProblem& problem);
void index_keys(const IndexerProblem& problem, int ordinal, void* stream);
IndexerConfig indexer_config(const IndexerProblem& problem);
IndexerParams indexer_params(const IndexerProblem& problem, FaultBytes* faults = nullptr);

// Kernels of several dtypes and capacities: what CI compiles.
std::vector<KernelSpec> indexer_specs();

// Those that choose the keys of a sparse call of a dtype, from queries of that dtype or of
// float8_e4m3fn of up to 128 numbers. topk: the entries of its table; none beyond kMostChosen.
std::vector<KernelSpec> indexer_specs_of(DType dtype, i64 topk);

// Likewise of fulmen_quantise. problem: of validate_quantise.
int device_of(const QuantiseProblem& problem);
void quantise(const QuantiseProblem& problem, int ordinal, void* stream);
QuantiseArrayConfig quantise_config(const QuantiseProblem& problem);
QuantiseArrayParams quantise_params(const QuantiseProblem& problem, FaultBytes* faults = nullptr);

// Kernels of several dtypes and dims: what CI compiles.
std::vector<KernelSpec> quantise_specs();

// Those that fill a cache of 8 bits of a call, keys being rotated, and that rotate its queries.
std::vector<KernelSpec> quantise_specs_of(const Problem& problem);

}  // namespace fulmen::gpu
