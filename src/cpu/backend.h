// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the CPU offers to the C ABI: run a planned problem on one of its implementations.
// attention_scalar is the oracle (float64, in the order of the equations); attention_tiled is the
// fast one. Both take validated problems whose arrays are in host memory and write every row of
// every output that is present.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/append.h"
#include "core/indexer.h"
#include "core/problem.h"
#include "core/quantisation.h"
#include "core/validate.h"
#include "plan/plan.h"

namespace fulmen::cpu {

struct PairKernels;

// The plan of a simple call: that of an earlier call like it, or a new one. Throws what validate
// throws. Thread safe.
std::shared_ptr<const Plan> plan_of(const Request& request);

// Runs the problem as the plan says. workspace: plan.workspace_bytes, any alignment and contents.
// problem: the plan's, with the pointers of this run. Thread safe.
void run(const Plan& plan, const Problem& problem, void* workspace);

// The oracle: no workspace, no threads, O(kv_rows) memory on the heap per call.
void scalar_forward(const Problem& problem);
void scalar_backward(const Problem& problem);

// Online softmax over key blocks, SIMD, threads; no allocation.
void tiled_forward(const Plan& plan, const Problem& problem, void* workspace);
// The same with the products of pairs that are given; null: none.
void tiled_forward(const Plan& plan, const Problem& problem, void* workspace,
                   const PairKernels* pairs);
// Of it, the passes with few rows and many keys (splits_keys): the keys are split among the
// threads.
void split_keys_forward(const Plan& plan, const Problem& problem, void* workspace,
                        const PairKernels* pairs);
void tiled_backward(const Plan& plan, const Problem& problem, void* workspace);

// The instruction set and the number of threads that a run would use now. Throws Error when
// FULMEN_CPU_ISA names an instruction set that was not built or is not present.
CpuDevice cpu_device();

// A loop of the instruction set that a run would use, `steps` times on each of its threads, over
// bytes of buffer for kRead. Returns the floating-point operations, or the bytes read. Throws Error
// where the instruction set has no such loop.
enum class Loop { kMultiplyAdds = 1, kPairProducts = 2, kRead = 3 };
i64 run_loop(Loop loop, i64 steps, const void* buffer, i64 bytes);

// Names of the instruction sets that were built, best last.
std::vector<const char*> built_isas();

// Writes every row of o and, where present, lse. Sums in float64. problem: of validate_merge, its
// arrays in host memory. Rows are shared among the threads of the pool.
void merge(const MergeProblem& problem);

// Writes the rows of an append into its caches and rotates, or rotates alone. problem: of
// validate_append, its arrays in host memory. Checks their contents first: throws Error with
// nothing written. Rows are shared among the threads of the pool.
void append(const AppendProblem& problem);

// Writes the indices of an indexer. problem: of validate_indexer, its arrays in host memory; their
// contents are checked first, likewise.
void index_keys(const IndexerProblem& problem);

// Writes values, and constants and scales that are to be found. problem: of validate_quantise, its
// arrays in host memory; lengths are checked first, likewise.
void quantise(const QuantiseProblem& problem);

}  // namespace fulmen::cpu
