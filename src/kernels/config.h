// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two halves of a forward call as plain data: AttentionConfig, known when a kernel is compiled
// and its only template argument, and ForwardParams, known when it is launched.
// Read by the kernels, by the planner (which tiles fit?) and by the emulator. A config never holds
// a length or a batch size; the switches marked "ablation" exist to measure what each idea buys.
#pragma once

#include "kernels/attention/mask.cuh"

namespace fulmen {

// Which ends of a row's interval of visible keys can lie inside a block. The end of the sequence
// is handled by all three.
enum class MaskKind : u8 { kLength, kUpper, kBoth };

// When the exponent's shift (the running maximum of a row) is brought up to date.
enum class ShiftRule : u8 {
  kEveryBlock,   // ablation: before every block, the textbook online softmax
  kWhenGrown,    // before every block, but only when it grew by more than 2^8
  kWhenSumGrew,  // no maximum of full blocks; when a block's sum exceeds 2^14 (safe for f16)
  kFirstBlock,   // no maximum of full blocks at all; a result out of range is computed again
};

struct AttentionConfig {
  DType dtype = DType::kBFloat16;
  i32 d_qk = 128;  // multiples of 64
  i32 d_v = 128;
  i32 warpgroups = 2;       // that compute, 64 query rows each; one more loads
  i32 kv_rows = 128;        // keys per block
  i32 stages = 2;           // of K and of V in shared memory
  i32 q_buffers = 1;        // 2: the next Q arrives while this one is in use
  i32 q_register_dims = 0;  // so many dims of Q, a multiple of 16, stay in registers, since every
                            // product reads Q again (measured: 0 to 1 % at d 128 and 256)
  MaskKind mask = MaskKind::kLength;
  ShiftRule shift_rule = ShiftRule::kFirstBlock;
  bool stage_output = true;  // O leaves through shared memory and TMA, else from registers
  bool cache_hints = false;  // Q leaves the L2 first, K and V stay
  bool ping_pong = true;     // ablation: warpgroups take turns at the tensor cores
  bool overlap = true;       // ablation: O += P V of one block runs under the softmax of the next
  bool skip_full_masks = true;  // ablation: blocks that every row sees whole do no mask arithmetic
  bool longest_first = true;    // ablation: query blocks with the most keys come first
  bool folded_scale = true;     // ablation: exp2(s c - m c) as one multiply-add

  constexpr i32 q_rows() const { return 64 * warpgroups; }
  constexpr i32 threads() const { return 128 * (warpgroups + 1); }

  // Registers per thread after the hand-over (setmaxnreg). A block owns at most 65,536; at launch
  // all threads hold the same number, rounded down to a multiple of 8.
  constexpr i32 producer_registers() const { return warpgroups == 3 ? 32 : 40; }
  constexpr i32 consumer_registers() const {
    return warpgroups == 3 ? 160 : warpgroups == 2 ? 232 : 240;
  }

  // Bytes of shared memory, in the order in which they lie there.
  constexpr i32 q_bytes() const { return q_rows() * d_qk * 2; }
  constexpr i32 k_bytes() const { return kv_rows * d_qk * 2; }
  constexpr i32 v_bytes() const { return kv_rows * d_v * 2; }
  constexpr i32 o_bytes() const { return stage_output ? q_rows() * d_v * 2 : 0; }
  constexpr i32 shared_bytes() const {
    return q_buffers * q_bytes() + stages * (k_bytes() + v_bytes()) + o_bytes() + 512;
  }

  constexpr bool valid() const {
    return (dtype == DType::kBFloat16 || dtype == DType::kFloat16) && d_qk % 64 == 0 &&
           d_v % 64 == 0 && d_qk <= 256 && d_v <= 256 && kv_rows % 16 == 0 && kv_rows <= 256 &&
           1 <= warpgroups && warpgroups <= 3 && 1 <= stages && stages <= 6 && 1 <= q_buffers &&
           q_buffers <= 2 && q_register_dims % 16 == 0 && 0 <= q_register_dims &&
           q_register_dims <= d_qk && shared_bytes() <= 232448 &&
           !(dtype == DType::kFloat16 && shift_rule == ShiftRule::kFirstBlock);
  }
};

// A CUtensorMap: opaque to the kernels, made by the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

// Q: box (64, q_rows), K: (64, kv_rows), V: (64, kv_rows), O: (64, 64); dims (d, rows, heads,
// batch), 16-bit elements, 128-byte swizzle, zero fill.
struct ForwardTensorMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap o;
};

struct ForwardParams {
  i32 batch;
  i32 heads_q;
  i32 heads_kv;  // divides heads_q
  SequenceShape shape;
  IntervalMask mask;
  float scale_log2;     // softmax scale * log2(e), > 0
  i32 num_q_blocks;     // ceil(q_len / q_rows)
  i32 heads_per_group;  // heads that share the L2: their K and V take 32 MB or less
  u16* o;               // (batch, heads_q, q_len, d_v) with the strides below, in elements
  i64 o_stride_batch;
  i64 o_stride_head;
  i64 o_stride_row;
  float* lse;       // (batch, heads_q, q_len)
  u32* next_block;  // one counter, 0 before the first launch; every launch leaves it at 0
};

}  // namespace fulmen
