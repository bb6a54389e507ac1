// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The compile-time half of the append kernel. What it does not say is decided at run time.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

// Which elements of a head turn together: none; j and j + rotary_dim / 2; 2 j and 2 j + 1.
enum class Rotation : u8 { kNone, kHalves, kInterleaved };

// Rows of a block, at most: a lane finds where each goes, which has a place in shared memory.
inline constexpr i32 kMaxAppendRows = 32;
inline constexpr i32 kRowTargetBytes = 40;
inline constexpr i32 kAppendSharedBytes = kMaxAppendRows * kRowTargetBytes;

struct AppendConfig {
  DType dtype = DType::kFloat16;   // of new rows, of q and of caches that are not quantised
  DType quantised = DType::kNone;  // of the caches, where they have 8 bits; kUint8: records
  DType table = DType::kFloat32;   // of cos and sin
  Rotation rotation = Rotation::kNone;
  bool vectors = true;    // 16 bytes at a time; else one element, with any strides and alignment
  i32 num_threads = 288;  // a warp finds where rows go, the others move them

  constexpr bool has_records() const { return quantised == DType::kUint8; }
  constexpr i32 movers() const { return num_threads - kMaxAppendRows; }
  constexpr DType cache_dtype() const { return quantised == DType::kNone ? dtype : quantised; }
  constexpr i32 lanes() const {  // elements that a thread moves at once
    return vectors ? 16 / static_cast<i32>(size_bytes(dtype)) : 1;
  }
  // Rows of which a thread has a piece in registers before it writes the first. One that rotates
  // has two runs, and its columns of cos and sin.
  constexpr i32 rows_in_flight() const { return rotation == Rotation::kNone ? 4 : 1; }
  // Rows of which a thread has a piece, at most (H200, 2026-11-29, 16,384 rows: without rotation 39
  // us with 4 and 41 with 32; with one 185 with 1, 151 with 8, 153 with 32).
  constexpr i32 rows_of_thread() const { return rotation == Rotation::kNone ? 4 : 8; }
};

template <class Each>
constexpr void for_each_field(const AppendConfig& config, Each each) {
  each("dtype", config.dtype);
  each("quantised", config.quantised);
  each("table", config.table);
  each("rotation", config.rotation);
  each("vectors", config.vectors);
  each("num_threads", config.num_threads);
}

}  // namespace fulmen
