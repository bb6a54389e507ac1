// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels that make e4m3 of 16-bit q, k and v are compiled for and launched with, and
// those of fulmen_quantise.
#pragma once

#include "kernels/attention/quantisation.cuh"
#include "kernels/params.h"
#include "kernels/score_options.h"

namespace fulmen {

// How the threads of a block have rows.
struct RowLanes {
  static constexpr i32 kThreads = 256;
  static constexpr i32 kRowsOfThread = 4;
  static constexpr i32 kSampleThreads = 512;  // of the kernel that looks at a sample of the rows

  // A lane has so many elements of a row; rows take a power of two of lanes, of which some may be
  // idle.
  static constexpr i32 elements(i32 dim) { return dim <= 256 ? 8 : 16; }
  static constexpr i32 lanes(i32 dim) {
    i32 count = 2;
    while (count * elements(dim) < dim) count *= 2;
    return count;
  }
  static constexpr i32 block_rows(i32 dim) { return kRowsOfThread * (kThreads / lanes(dim)); }
  static constexpr i32 sample_bytes(i32 dim) { return kSampleThreads * elements(dim) * 4 + 64; }
};

struct QuantiseConfig {
  DType dtype = DType::kBFloat16;  // of q, k and v
  i32 d_qk = 128;                  // multiples of 16, up to 256
  i32 d_v = 128;
  bool varlen = false;  // lengths or offsets say which rows count
};

template <class Each>
constexpr void for_each_field(const QuantiseConfig& config, Each each) {
  each("dtype", config.dtype);
  each("d_qk", config.d_qk);
  each("d_v", config.d_v);
  each("varlen", config.varlen);
}

// Where e4m3 serves every number: a row's largest is at most 448, and its norm, if it is not 0, at
// least kSmallestNorm; of v its largest number at least kSmallestValue. So what is lost below the
// smallest number of e4m3, 2^-10, is less than what rounding takes off the row's larger ones. A
// sample's largest norm becomes 448, and its largest value kSampledValue, so that others may be
// larger.
inline constexpr float kLargestE4M3 = 448;
inline constexpr float kSmallestNorm = 3.5f;
inline constexpr float kSampledValue = 56;
inline constexpr float kSmallestValue = 0.0625f;

struct QuantiseParams {
  // q, k, v, lengths and offsets; lse.
  AttentionParams attention;

  u8* q;                // (batch, head, q_row, d_qk), one row behind the other
  u8* k;                // (batch, kv_head, kv_row, d_qk)
  u8* v;                // (batch, kv_head, kv_row, d_v)
  float* q_scale;       // (batch, head)
  float* k_scale;       // (batch, kv_head)
  float* v_scale;       // (batch, kv_head)
  float* constant;      // (batch, kv_head, d_qk): what is taken off k
  float* difference;    // (batch, head, q_row): what scores miss of it; null where nothing asks
  u32* unfit;           // 0 before; 1 where e4m3 does not serve
  float scale;          // of the softmax
  bool keeps_constant;  // nothing is taken off k

  constexpr i64 kv_batch() const { return attention.kv_batch_extent(); }
  constexpr i64 q_batch() const { return attention.batch_extent(); }
};

// ---- fulmen_quantise
// -----------------------------------------------------------------------------

struct QuantiseArrayConfig {
  DType dtype = DType::kBFloat16;     // of x
  DType values = DType::kFloat8E4M3;  // or dtype
  i32 dim = 128;                      // up to 512
  bool rotate = false;
  bool vectors = true;  // rows of x, and of values, lie as kernels read them at once
};

template <class Each>
constexpr void for_each_field(const QuantiseArrayConfig& config, Each each) {
  each("dtype", config.dtype);
  each("values", config.values);
  each("dim", config.dim);
  each("rotate", config.rotate);
  each("vectors", config.vectors);
}

struct QuantiseArrayParams : QuantiseArrays<ArrayView> {
  QuantiseExtents extents;
  FaultBytes* faults;  // of the device, or null
};
static_assert(sizeof(QuantiseArrayParams) <= 4096);

}  // namespace fulmen
