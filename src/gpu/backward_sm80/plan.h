// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm80 implementation as plans see it: every option of the library for
// 16-bit inputs, and for float32 where precision permits. Which tiles head dimensions get on a
// card, and what lies where in the workspace, is decided here; src/gpu/backward_sm80/run.cpp
// compiles and launches it. Pure.
#pragma once

#include "gpu/function_plan.h"
#include "kernels/backward_sm80/config.h"

namespace fulmen {

// What the main kernel may spill, a third above the most that was met (NVRTC 13.0): 848 bytes at
// d 128 with every option and rows without units for sm_80; for sm_90a 704 with every option, 540
// at d 256 without any. Its loops over tiles load at most two spilled words a step; the rest is
// written and read where a block stores what the array's strides do not let it store 16 bytes at a
// time.
inline constexpr size_t kSm80BackwardSpillBytes = 1152;

// The kernel of a problem with every optimisation; no warps where no tiles fit the card.
BackwardSm80Config sm80_backward_tiles(const Problem& problem, const Gpu& gpu);

// Called where the dtype and the card are right for sm80.
std::string sm80_backward_refusal(const Problem& problem, const Gpu& gpu);

// The rest is called only where nothing is refused.
GpuNeeds sm80_backward_needs(const Problem& problem, const Gpu& gpu);
BackwardSm80Config sm80_backward_config(const Problem& problem, const Gpu& gpu);

// Those parts of a config on which the kernels before and after the main one depend, so that fewer
// of them are compiled.
BackwardSm80Config sm80_rows_config(const Problem& problem, const BackwardSm80Config& config);
BackwardSm80Config sm80_dbias_config(const BackwardSm80Config& config);
BackwardSm80Config sm80_finish_config(const BackwardSm80Config& config);

// Whether dbias comes from these kernels; else it does from simt's.
bool sm80_has_dbias(const Problem& problem);
// Whether it has one element for the pairs of several heads.
bool sm80_shares_dbias(const Problem& problem);

// Whether no structured mask hides anything.
bool sm80_sees_all(const Problem& problem);

// Key/value heads whose blocks are neighbours in a launch.
i32 sm80_lines_per_group(const Problem& problem);

// How many groups of them ahead of its own a block clears sums of dQ: as many as run at a time; or
// all, which backward_preprocess_sm80 clears.
i32 sm80_groups_ahead(const Problem& problem, const BackwardSm80Config& config);

// Places in the workspace, in bytes; marks of suspect rows come first.
struct Sm80BackwardWorkspace {
  i64 suspect_n_blocks_at;
  i64 dq_semaphores_at;
  i64 next_n_block_at;
  i64 zeroed_blocks_at;
  i64 dbias_accum_at;
  i64 zeroed_bytes;
  i64 row_tiles_at;
  i64 key_bounds_at;
  i64 dq_accum_at;
  i64 row_terms_at;  // of simt's kernels for dbias and dsinks
  i64 bytes;
};
Sm80BackwardWorkspace sm80_backward_workspace(const Problem& problem,
                                              const BackwardSm80Config& config);

}  // namespace fulmen
