// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of forward_sm80 by head dimension, the best that were measured first, the narrowest last.
// Which of them fits a problem and a card is decided in plan.cpp.
#pragma once

#include <cstddef>

#include "kernels/base.cuh"

namespace fulmen::gpu {

// Shared memory that the system keeps of every block.
inline constexpr std::size_t kReservedSharedBytes = 1024;

inline constexpr i64 kAnyLength = i64{1} << 40;

// The first that fits is taken: head dimensions up to max_dim, up to max_keys keys a query, room
// for min_blocks blocks on a multiprocessor.
struct Sm80Shape {
  i32 max_dim, warps = 4, row_tiles = 2, kv_rows = 32, min_blocks = 2;
  i32 many_kv_rows = kv_rows;      // where options leave a warp 16 rows
  i32 pair_kv_rows = kv_rows;      // with a mask, a bias or documents alone
  i32 dropout_kv_rows = kv_rows;   // with dropout alone
  i32 modified_kv_rows = kv_rows;  // with a score modifier alone
  i32 warps_n = 1;                 // more: not where options take many registers
  i32 stage_blocks = 1;            // but one where arrays belong to pairs
  bool q_in_registers = false;     // not with options
  bool single_buffer = false;      // not with options
  bool predicates_copies = false;  // see ForwardSm80Config
  i64 max_keys = kAnyLength;       // that a query meets; no bound holds if batch_invariant

  // Dims of V that one block takes: 128 sums a thread, 160 where warps share rows.
  constexpr i32 max_v() const { return warps_n > 1 ? max_dim : 256; }
};
// NVIDIA H200, 2026-11-28: bench/results/2026-11-28-sm80-variants-h200.jsonl; the reasons are in
// docs/design/forward_sm80.md.
inline constexpr Sm80Shape kShapes[] = {
    {.max_dim = 48, .kv_rows = 64, .q_in_registers = true},
    {.max_dim = 64, .kv_rows = 64, .stage_blocks = 2, .q_in_registers = true},
    {.max_dim = 64, .kv_rows = 64, .q_in_registers = true},
    {.max_dim = 80},
    {.max_dim = 96, .kv_rows = 48, .many_kv_rows = 32, .pair_kv_rows = 32, .dropout_kv_rows = 32},
    {.max_dim = 96},
    {.max_dim = 128,
     .kv_rows = 48,
     .many_kv_rows = 64,
     .pair_kv_rows = 32,
     .dropout_kv_rows = 32,
     .modified_kv_rows = 32},
    {.max_dim = 128, .many_kv_rows = 64},
    {.max_dim = 192, .warps = 8, .row_tiles = 1, .kv_rows = 64, .min_blocks = 1},
    {.max_dim = 256,
     .row_tiles = 1,
     .kv_rows = 64,
     .single_buffer = true,
     .predicates_copies = true,
     .max_keys = 512},
    {.max_dim = 256,
     .warps = 8,
     .kv_rows = 96,
     .min_blocks = 1,
     .warps_n = 2,
     .single_buffer = true},
    {.max_dim = 256, .warps = 8, .kv_rows = 64, .min_blocks = 1, .warps_n = 2},
    {.max_dim = 256, .warps = 8, .row_tiles = 1, .kv_rows = 64, .min_blocks = 1},
    {.max_dim = 256, .warps = 8, .row_tiles = 1, .min_blocks = 1},
    {.max_dim = 256, .row_tiles = 1, .min_blocks = 1},
    {.max_dim = 320,
     .warps = 8,
     .kv_rows = 64,
     .min_blocks = 1,
     .warps_n = 2,
     .single_buffer = true},
    {.max_dim = 320, .warps = 8, .min_blocks = 1, .warps_n = 2},
    {.max_dim = 512,
     .warps = 8,
     .kv_rows = 64,
     .min_blocks = 1,
     .warps_n = 4,
     .single_buffer = true},
    {.max_dim = 576, .warps = 8, .row_tiles = 1, .min_blocks = 1, .warps_n = 2},
    {.max_dim = 576, .row_tiles = 1, .min_blocks = 1},
    {.max_dim = 576, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
    {.max_dim = 576, .warps = 2, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
    {.max_dim = 576, .warps = 1, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
};

// Of e4m3, whose rows are half as long; no card that has its products was at hand.
inline constexpr Sm80Shape kE4M3Shapes[] = {
    {.max_dim = 64, .kv_rows = 64},
    {.max_dim = 128},
    {.max_dim = 256, .warps = 8, .row_tiles = 1, .kv_rows = 64, .min_blocks = 1},
    {.max_dim = 256, .row_tiles = 1, .min_blocks = 1},
};

// The same for float32 inputs, whose tiles are twice as large: by one tf32 product, by three.
inline constexpr i64 kMaxFloat32Dim = 256;
inline constexpr Sm80Shape kTf32Shapes[] = {
    {.max_dim = 64, .kv_rows = 64, .many_kv_rows = 32},
    {.max_dim = 64},
    {.max_dim = 128,
     .warps = 8,
     .row_tiles = 1,
     .kv_rows = 64,
     .min_blocks = 1,
     .many_kv_rows = 32},
    {.max_dim = 128, .row_tiles = 1},
    {.max_dim = 128, .row_tiles = 1, .min_blocks = 1},
    {.max_dim = 256, .row_tiles = 1, .min_blocks = 1},
    {.max_dim = 256, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
    {.max_dim = 256, .warps = 2, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
    {.max_dim = 256, .warps = 1, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
};
inline constexpr Sm80Shape k3xTf32Shapes[] = {
    {.max_dim = 64},
    {.max_dim = 128, .single_buffer = true},
    {.max_dim = 128, .row_tiles = 1},
    {.max_dim = 128, .row_tiles = 1, .min_blocks = 1},
    {.max_dim = 256, .row_tiles = 1, .min_blocks = 1},
    {.max_dim = 256, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
    {.max_dim = 256, .warps = 2, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
    {.max_dim = 256, .warps = 1, .row_tiles = 1, .kv_rows = 16, .min_blocks = 1},
};

}  // namespace fulmen::gpu
