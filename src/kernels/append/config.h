// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The compile-time half of the append kernel. What it does not say is decided at run time.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

// Which elements of a head turn together: none; j and j + rotary_dim / 2; 2 j and 2 j + 1.
enum class Rotation : u8 { kNone, kHalves, kInterleaved };

struct AppendConfig {
  DType dtype = DType::kFloat16;   // of new rows, of q and of caches that are not quantised
  DType quantised = DType::kNone;  // of the caches, where they have 8 bits
  DType table = DType::kFloat32;   // of cos and sin
  Rotation rotation = Rotation::kNone;
  bool vectors = true;  // 16 bytes at a time; else one element, with any strides and alignment
  i32 num_threads = 256;

  constexpr DType cache_dtype() const { return quantised == DType::kNone ? dtype : quantised; }
  constexpr i32 lanes() const {  // elements that a thread moves at once
    return vectors ? 16 / static_cast<i32>(size_bytes(dtype)) : 1;
  }
};

// Rows of a block, at most: each has a place in shared memory.
inline constexpr i32 kMaxAppendRows = 32;
inline constexpr i32 kRowTargetBytes = 40;
inline constexpr i32 kAppendSharedBytes = kMaxAppendRows * kRowTargetBytes;

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
