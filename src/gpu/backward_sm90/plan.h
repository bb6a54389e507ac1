// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm90 implementation: what it refuses, and the configs, order of work
// tiles, workspace and parameters that a problem gets on a card. plan.cpp and layout.cpp
// decide, pure; run.cpp fills in parameters and launches the kernels of kernels/backward_sm90 and
// kernels/dq_sm90.
#pragma once

#include <optional>
#include <vector>

#include "gpu/gpu_plan.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/tile_lists.h"
#include "kernels/backward_sm90/config_beside.h"

namespace fulmen::gpu {

PlanOrRefusal plan_backward_sm90(const Problem& problem, const Gpu& gpu);

// The optimisations that its kernels can be made without.
u32 backward_sm90_switches(const Problem& problem, const Gpu& gpu);

// What is compiled for a problem.
struct BackwardSm90Configs {
  BackwardPreprocessConfig preprocess;
  // backward_sm90: dK and dV, and dQ unless it has a kernel of its own.
  std::optional<BackwardSm90Config> main;
  // backward_dq_sm90: seven products of a pair of tiles instead of five (eight above 128 dims), but
  // nothing is added in global memory.
  std::optional<ForwardSm90Config> dq;
  bool has_fallback = false;  // the mask hides pairs inside of blocks

  bool operator==(const BackwardSm90Configs&) const = default;

  i64 kv_rows() const { return main ? main->kv_rows() : BackwardSm90Config{}.kv_rows(); }
  bool has_document_blocks() const { return preprocess.score.documents; }
  // Lists of tiles of `main` and `dq`.
  TileShape lists_of_main() const { return {main->q_rows, main->kv_rows(), true}; }
  TileShape lists_of_dq() const { return {dq->q_rows(), dq->kv_rows, false}; }
};
BackwardSm90Configs backward_sm90_configs(const Problem& problem);

// Whether thread blocks can have whole heads (BackwardSm90Config::whole_heads).
bool fits_whole_heads(const Problem& problem);

// Counts and the order of a run, and where its parts of the workspace begin, in bytes. Counters:
// one of work tiles for each launch, at most kLaunches; done and freed (batch_kv_head); nonfinite
// (1 + batch_kv_head); parts_done; dq_semaphore.
struct BackwardSm90Layout {
  static constexpr i64 kLaunches = 2;

  BackwardSchedule schedule;
  i64 num_batch_kv_heads;
  i64 kv_rows;         // of a block of keys
  i64 claims_of_head;  // of work tiles, or of two that share loads
  i64 num_kv_blocks;   // with the one that such a claim may have too many
  i64 num_conversion_blocks;
  i64 padded_rows_per_head;
  i64 num_rows;   // of lse_log2 and delta, of all heads
  i64 num_split;  // work tiles, as in BackwardParams
  i64 num_parts = 1;
  i64 part_bytes;         // of the sums of one part of each
  i64 num_part_counters;  // words of parts_done
  i64 zeroed_bytes;       // sums of dQ and counters
  i64 counters_at;
  i64 lse_at;
  i64 delta_at;
  i64 part_sums_at;
  i64 key_blocks_at;     // of the blocks of keys of sequences with different lengths
  i64 num_key_ranges;    // blocks of keys whose documents backward_dq_sm90 reads
  i64 num_query_ranges;  // blocks of queries whose documents backward_preprocess_sm90 reads
  i64 key_ranges_at;
  i64 query_ranges_at;
  i64 document_blocks_at;
  i64 key_lists_at;    // lists of tiles, of backward_sm90
  i64 query_lists_at;  // of backward_dq_sm90
  i64 query_lists_bytes;
  i64 workspace_bytes;

  i64 num_claims() const { return num_batch_kv_heads * claims_of_head; }
};
BackwardSm90Layout backward_sm90_layout(const Problem& problem, const BackwardSm90Configs& configs,
                                        const Gpu& gpu);

class BackwardSm90Plan final : public GpuPlan {
 public:
  BackwardSm90Configs configs;
  BackwardSm90Layout layout;
  // But for pointers and tensor maps:
  BackwardPreprocessParams preprocess;
  BackwardParams main;
  BackwardDqParams dq;
  TileListsParams key_lists;  // with lists of blocks
  TileListsParams query_lists;
  ForwardArguments query_ranges;  // of document_ranges_sm90, with queries in the place of keys
  AttentionParams side;           // of dsinks, by simt
  size_t row_terms_at =
      0;  // in the workspace, of gradients of what a score reads; 0: none are made

  // From configs and layout.
  void set_params(const Problem& problem, const Gpu& gpu);

  // With the pointers of a run, but for tensor maps.
  BackwardPreprocessParams preprocess_of(const Problem& problem, char* workspace,
                                         FaultBytes* faults) const;
  BackwardParams main_of(const Problem& problem, char* workspace) const;
  BackwardDqParams dq_of(const Problem& problem, char* workspace) const;
  ForwardArguments query_ranges_of(const Problem& problem, char* workspace) const;
  // What fills the lists of tiles of backward_sm90, by keys, or of backward_dq_sm90.
  TileListsParams tile_lists_of(bool by_keys, const Problem& problem, char* workspace,
                                FaultBytes* faults) const;
  BackwardFallbackParams fallback_of(const Problem& problem, char* workspace) const;

  void run(const Call& call) const override;
};

// ---- What several of these files read off a problem --------------------------------------------

constexpr i64 rows_up(i64 rows, i64 multiple) { return ceil_div(rows, multiple) * multiple; }

// Rows of a head in lse_log2 and delta: every sequence begins at a multiple of kConversionRows.
inline i64 padded_rows_per_head(const Problem& problem) {
  const i64 rows = rows_up(problem.q_rows, BackwardSm90Config::kConversionRows);
  return problem.packed.q ? rows + (problem.num_sequences + 1) * BackwardSm90Config::kConversionRows
                          : rows;
}

// Dims of a tile: smaller head dimensions are filled up with zeros.
inline i32 tile_dims(const Problem& problem) {
  return static_cast<i32>(rows_up(max(problem.dim_qk, problem.dim_v), 64));
}

inline bool is_deterministic(const Problem& problem) { return problem.has_ordered_sums(); }

// What these kernels do not do beyond 256 dims, where registers hold gradients of 64 rows and
// little else: one clause; "" where they do, or of fewer dims.
std::string wide_refusal(const Problem& problem);

KernelSpec backward_preprocess_spec(const BackwardPreprocessConfig& config);
KernelSpec backward_sm90_spec(const BackwardSm90Config& config);
KernelSpec backward_dq_spec(const ForwardSm90Config& config);
KernelSpec backward_fallback_spec(const BackwardFallbackConfig& config);

// Kernels that CI compiles for Hopper: every config that plans choose, in groups.
std::vector<std::vector<KernelSpec>> backward_sm90_specs();

}  // namespace fulmen::gpu
