// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The run-time half of a call to a general kernel (naive, simt): every array that a problem can
// have, as a view, and the plain values of its options. The host fills it from a Problem; kernels
// get it by value. Kernels that need less (TMA, fixed layouts) have smaller params of their own.
#pragma once

#include "kernels/attention/dropout.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/score_mod.cuh"
#include "kernels/attention/sequence.cuh"

namespace fulmen {

// One array with four axes. An absent array has dtype kNone; an axis that is broadcast, stride 0.
struct ArrayView {
  u8* data;
  i64 strides[4];  // in elements
  DType dtype;

  constexpr bool present() const { return dtype != DType::kNone; }
  constexpr i64 offset(i64 a, i64 b, i64 c, i64 d) const {
    return a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
  }
};

struct AttentionParams {
  ArrayView q;     // (batch, head, q_row, dim_qk)
  ArrayView k;     // (batch, kv_head, kv_row, dim_qk)
  ArrayView v;     // (batch, kv_head, kv_row, dim_v)
  ArrayView bias;  // (sequence, head, q_row, kv_row)    rows count from the sequence's first
  ArrayView mask;  // (sequence, head, q_row, kv_row)    likewise
  ArrayView alibi_slopes;  // (sequence, head, 1, 1)
  ArrayView sinks;         // (1, head, 1, 1)
  ArrayView q_lengths;     // (1, 1, 1, sequence)
  ArrayView kv_lengths;    // (1, 1, 1, sequence)
  ArrayView cu_q;          // (1, 1, 1, sequence + 1)
  ArrayView cu_kv;         // (1, 1, 1, sequence + 1)
  ArrayView q_ids;         // (batch, 1, 1, q_row)
  ArrayView kv_ids;        // (batch, 1, 1, kv_row)
  ArrayView o;             // (batch, head, q_row, dim_v)
  ArrayView lse;           // (batch, head, q_row, 1)
  ArrayView stats;         // (batch, head, q_row, 2)    row_max, row_sum
  ArrayView dout;          // as o
  ArrayView dlse;          // as lse
  ArrayView dq;            // as q
  ArrayView dk;            // as k
  ArrayView dv;            // as v
  ArrayView dbias;         // as bias, extents below
  ArrayView dsinks;        // (1, head, 1, 1)
  ArrayView row_terms;     // (batch, head, q_row, 4)    in simt's workspace: SavedRow

  i64 num_sequences;  // the batch; arrays of a packed side have one batch entry
  i64 heads_q;
  i64 heads_kv;  // divides heads_q
  i64 q_rows;    // extent of the q_row axis: all sequences together when packed
  i64 kv_rows;   // likewise; with a page table the most keys of a request
  i64 dim_qk;
  i64 dim_v;
  i64 dbias_extents[4];  // 1 where dbias is summed over the axis

  IntervalMask mask_options;
  ScoreMap<double> score_map;
  Dropout dropout;
  const i64* rng;  // (2) seed, offset in device memory, instead of dropout's; or null
  Packed packed;
  bool bottom_right;   // alignment
  bool accumulates;    // o and stats hold a part of the rows, which the result is merged with
  FaultBytes* faults;  // of the device (common/faults.cuh), or null

  // Of caches; looked at by kernels that are compiled for them (common/head.cuh).
  ArrayView page_table;   // (batch, 1, 1, page), with page_indptr (1, 1, 1, page)
  ArrayView page_indptr;  // (1, 1, 1, sequence + 1)
  ArrayView kv_start;     // (1, 1, 1, sequence)
  ArrayView positions;    // (batch, 1, 1, q_row)
  ArrayView tree;         // (batch, 1, 1, q_row)
  CacheLayout cache_layout;
  i64 num_pages;  // of k and v

  // Lists of blocks (common/block_lists.cuh).
  ArrayView blocks;  // (sequence, head or kv_head or 1, q_block, entry)
  i64 block_q;
  i64 block_kv;
  i64 num_key_blocks;
  i64 list_heads;
  i64 list_entries;
  bool lists_by_pair;  // asked pair by pair; false: only tiles of listed blocks are met

  // Of quantised q, k and v; looked at by kernels that are compiled for them. As these, but dim 1,
  // or of v stride 0 along the rows.
  ArrayView q_scale;
  ArrayView k_scale;
  ArrayView v_scale;

  constexpr i64 group_size() const {
    return static_cast<u32>(heads_q) / static_cast<u32>(heads_kv);  // 64-bit divisions are calls
  }
  constexpr i64 batch_extent() const { return packed.q ? 1 : num_sequences; }  // of q, o
  constexpr bool has_caches() const {
    return page_table.present() || kv_start.present() || positions.present() || tree.present();
  }
  constexpr i64 kv_batch_extent() const { return packed.kv ? 1 : num_sequences; }
};

// A CUtensorMap: opaque to the kernels, made by the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

// What the kernel that adds the gradients of a part to those that are there is given
// (simt/add_gradients.cuh).
inline constexpr i64 kAddedElements = 8;  // of a row, which a thread adds

// A gradient of a call: contiguous, in rows of whole 16 bytes; and the sums that it is added to.
struct AddedGradient {
  ArrayView sums;
  ArrayView part;
  u32 heads, rows, dim;  // extents; the first axis is what is left
  u32 vectors_of_row;
  u32 num_vectors;  // memory ends before 32 bits do
};

struct AddedGradients {
  AddedGradient gradients[3];
  u32 count;
};

}  // namespace fulmen
