// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// V of e4m3 as forward_sm90 multiplies it. A tensor core takes 8-bit operands along the sum alone,
// so V is transposed before: by blocks of keys, which are numbered through all sequences
// (common/documents_sm90.cuh), a row of 128 bytes for each dim. And of 16 keys each thread of a
// quad has four scores, 2c, 2c + 1, 8 + 2c and 9 + 2c, which are neighbours as a left operand: keys
// lie in that order, so that probabilities need no exchange. Keys past a sequence's end are 0, and
// so is what a block of fewer keys leaves of a row. The kernel transpose_values_sm90 runs before
// forward_sm90, on its arguments: a thread block for each block of keys and key head; every byte of
// V is read once.
#pragma once

#include "kernels/common/documents_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

// Where a key of a block lies in a row.
constexpr i32 value_column(i32 key) {
  return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2;
}

template <ForwardSm90Config kConfig>
struct ValueTranspose {
  static constexpr i32 kWords = kConfig.d_v / 4;  // of a row in shared memory
  static constexpr i32 kVectors = kConfig.d_v / 16;
  static constexpr i32 kRow = kConfig.row_bytes(kConfig.kv_rows);

  const AttentionParams& p;
  u32 shared;

  // Words of 16 keys in a row are exchanged by the number of the 16, so that lanes that read
  // different ones seldom meet in a bank: within the largest power of two that divides a row.
  static constexpr i32 kExchanged = kVectors & -kVectors;
  static constexpr u32 swizzled(i32 key, i32 word) {
    return u32(key * kWords + (word ^ key / 16 % kExchanged * 4));
  }

  // V, rows of keys: rows from `rows` on are 0.
  void load(const u8* first, i32 rows) const {
#pragma unroll 4
    for (i32 at = i32(ptx::thread_index()); at < kRow * kVectors; at += kValueThreads) {
      const i32 key = at / kVectors, vector = at % kVectors;
      ptx::U32x4 x{};
      if (key < rows && vector * 16 < p.dim_v) {
        x = ptx::load_global_x4(
            reinterpret_cast<const u16*>(first + key * p.v.strides[2] + vector * 16));
      }
      ptx::store_shared_x4(shared + 4 * swizzled(key, 4 * vector), x);
    }
  }

  // 16 keys of four dims, transposed: rows of `out`.
  void store(u8* out) const {
#pragma unroll 1
    for (i32 at = i32(ptx::thread_index()); at < kRow / 16 * kWords; at += kValueThreads) {
      const i32 group = at % (kRow / 16), word = at / (kRow / 16);
      u32 x[16];
#pragma unroll
      for (i32 i = 0; i < 16; ++i) {
        x[i] = ptx::load_shared(shared + 4 * swizzled(16 * group + i, word));
      }
      ptx::U32x4 rows[4];
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        const u32 near_low = ptx::permute(x[2 * c], x[2 * c + 1], 0x5140);
        const u32 near_high = ptx::permute(x[2 * c], x[2 * c + 1], 0x7362);
        const u32 far_low = ptx::permute(x[8 + 2 * c], x[9 + 2 * c], 0x5140);
        const u32 far_high = ptx::permute(x[8 + 2 * c], x[9 + 2 * c], 0x7362);
        rows[0].word[c] = ptx::permute(near_low, far_low, 0x5410);
        rows[1].word[c] = ptx::permute(near_low, far_low, 0x7632);
        rows[2].word[c] = ptx::permute(near_high, far_high, 0x5410);
        rows[3].word[c] = ptx::permute(near_high, far_high, 0x7632);
      }
#pragma unroll
      for (i32 dim = 0; dim < 4; ++dim) {
        u8* const row = out + (4 * word + dim) * kRow + 16 * group;
        ptx::store_global_x4(reinterpret_cast<u16*>(row), rows[dim]);
      }
    }
  }
};

template <ForwardSm90Config kConfig>
inline void transpose_values_sm90(const ForwardArguments& arguments) {
  const ForwardParams& params = arguments.params;
  const AttentionParams& p = params.attention;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const i32 head = i32(ptx::block_index()) % params.heads_kv;
  const i64 number = i32(ptx::block_index()) / params.heads_kv;
  const i64 sequence = sequence_of_key_range(p, kConfig.kv_rows, number);
  const SeqlenInfo seqlen = seqlen_info_of<kConfig>(params, {0, 0, i32(sequence)});
  const i64 block = number - first_key_range(p, kConfig.kv_rows, sequence, seqlen.kv_begin);
  const i64 first = block * kConfig.kv_rows;
  if (block < 0 || (block > 0 && first >= seqlen.shape.kv_len)) return;  // of no keys
  const ValueTranspose<kConfig> transposed{p, ptx::dynamic_shared()};
  const i64 at = p.v.offset(seqlen.kv_batch, head, seqlen.kv_begin + first, 0);
  transposed.load(p.v.data + at, i32(min<i64>(seqlen.shape.kv_len - first, kConfig.kv_rows)));
  ptx::block_sync();
  transposed.store(params.values + (number * params.heads_kv + head) * kConfig.v_bytes());
}

}  // namespace fulmen
