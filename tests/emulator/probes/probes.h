// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the host and the probes' kernel agree on. A probe runs one instruction, or the few that make
// sense together only, on words from `in` and leaves all that it gives in `out`.
#pragma once

#include "kernels/forward_sm90/config.h"

namespace fulmen {

enum class Probe : i32 {
  // One warp.
  kMmaBFloat16,  // per product and lane: 4 words of A, 2 of B, 4 of D
  kMmaFloat16,
  kMmaTf32,   // 16 x 8 times 8 x 8
  kLdmatrix,  // 512 words of shared memory, then a row of 16 bytes for each lane
  kLdmatrixTransposed,
  kStmatrix,  // 4 words a lane, then its row
  kStmatrixTransposed,
  kShuffles,  // a word and a lane for each lane
  kPack,      // pairs of floats
  kPackE4M3,  // four floats
  kExact,     // triples of floats: max, fma, mul
  kExp2,      // floats, as below
  kLog2,
  kReciprocal,
  kExp,
  kLog,
  kTanh,
  kSums,     // a float for each lane, added to zeros
  kCpAsync,  // 512 words in global memory
  // A warpgroup: 2,048 words of A, 8,192 of B, then D; A in registers comes first of all.
  kWgmmaRows64,     // bfloat16, N 64, both by descriptor, B is N x K
  kWgmmaRows256,    // the same with N 256
  kWgmmaColumns,    // float16, N 128, B is K x N
  kWgmmaRegisters,  // float16, N 128, A in registers, B is K x N
  kWgmmaPlain,      // bfloat16, N 64, no swizzle
  kWgmmaE4M3,       // e4m3, N 128, both by descriptor, B is N x K
  kWgmmaE4M3Registers,
  // The copy engine: coordinates of boxes, 4 words each; the tensor follows.
  kTensorLoad,       // 64 columns, 128-byte swizzle
  kTensorLoadPlain,  // 8 columns
  kTensorStore,      // 64 columns, 128-byte swizzle, into `out`
  kBulkLoad,
  // A cluster: 512 words, of which block r takes those from 16 r on; 512 words of every block.
  kClusterAccess,  // ranks, then words of the next block and of the one after it
  kClusterStore,   // st.shared::cluster, mbarrier.arrive
  kClusterStoreAsync,
  kClusterBulk,
  kClusterMulticast,  // a box of the tensor that the words are, for every second block, for all
};

enum class ProbeFamily : i32 { kWarp, kWarpgroup, kCopies, kCluster };

struct ProbeConfig {
  ProbeFamily family;
};

struct ProbeParams {
  TensorMap map;
  const u32* in;
  u32* out;
  Probe probe;
  i32 count;  // of products, numbers or boxes; of blocks of a cluster
};

inline constexpr i32 kProbeBoxRows = 16;
inline constexpr u32 kProbeSharedBytes = 49152;

}  // namespace fulmen
