// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention on the tensor cores of every GPU since Ampere, every option of the library. Each
// warp owns 16 or 32 query rows and the whole width of their O; K and V come through shared memory
// for all warps of the block, a few blocks of keys ahead of their use.
// Source: Dao, FlashAttention-2 (2023), section 3. A step, for every block of keys that a row sees:
//   1. K_j, V_j have arrived; the copies of block j + stages - 1 are started
//   2. S = Q K^T                                         mma.sync
//   3. scores: scale, softcap, bias, ALiBi, masks         only where the problem or the block has
//   any
//   4. P = exp(S - m); l, O follow a grown m              rare, by vote of the warp
//   5. O += P V                                          P never leaves the registers
// A hidden key has weight 0, and 0 times NaN is NaN: rows of O that come out NaN or infinite though
// their sum is finite are computed again by forward_naive, which reads visible keys alone.
// Launched with forward_sm80_blocks() blocks, see head_order.cuh.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/forward_naive.cuh"
#include "kernels/tile/copy.cuh"
#include "kernels/tile/head_order.cuh"
#include "kernels/tile/store_output.cuh"
#include "kernels/tile/warp_terms.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardSm80 {
  using HeadType = Head<kConfig.dtype>;
  using QTile = SwizzledTile<kConfig.d_qk, kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.d_v, kConfig.swizzle>;
  static constexpr i32 kTiles = kConfig.row_tiles;
  static constexpr i32 kQSteps = kConfig.q_in_registers ? kConfig.d_qk / 16 : 1;
  using Scores = float[kTiles][kConfig.columns / 2];
  static_assert(kConfig.valid());

  const AttentionParams& p;
  const HeadType& head;
  i64 first_row;  // of the block, in its sequence
  i64 first_dim;  // of V and O
  RowSource k_source, v_source;
  u32 shared = ptx::dynamic_shared();
  u32 rQ[kTiles][kQSteps][4];
  float O[kTiles][kConfig.d_v / 2];
  WarpSoftmax<kConfig> softmax;

  ForwardSm80(const HeadType& head_, i64 first_row_, i64 first_dim_)
      : p(head_.p),
        head(head_),
        first_row(first_row_),
        first_dim(first_dim_),
        k_source(p.k, head.kv_row(p.k, 0), head.sequence.shape.kv_len, p.dim_qk),
        v_source(p.v, head.kv_row(p.v, 0) + first_dim * p.v.strides[3], head.sequence.shape.kv_len,
                 p.dim_v - first_dim),
        softmax(static_cast<float>(p.score_map.scale)) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.d_v / 2; ++i) O[t][i] = 0;
    }
  }

  i64 warp_row() const { return first_row + warp_index() * kConfig.warp_rows(); }
  i64 num_rows() const { return head.sequence.shape.q_len; }

  QTile q_tile() const { return {shared}; }
  QTile k_tile(i32 stage) const { return {shared + kConfig.q_bytes() + stage * kConfig.k_bytes()}; }
  VTile v_tile(i32 stage) const {
    return {shared + kConfig.q_bytes() + kConfig.stages * kConfig.k_bytes() +
            stage * kConfig.v_bytes()};
  }
  WarpTerms<kConfig> terms() const {
    return {head, warp_row(),
            shared + kConfig.forward_shared_bytes() - kConfig.term_bytes() +
                warp_index() * 16 * kConfig.term_stride() * 4};
  }

  // Start the copies of a block of keys, or of its values, if there is one.
  void fetch_k(i64 block, i64 end, i32 stage) const {
    if (block >= end) return;
    copy_rows<kConfig.columns, kConfig.threads()>(k_tile(stage), k_source,
                                                  static_cast<i32>(block * kConfig.columns));
  }
  void fetch_v(i64 block, i64 end, i32 stage) const {
    if (block >= end) return;
    copy_rows<kConfig.columns, kConfig.threads()>(v_tile(stage), v_source,
                                                  static_cast<i32>(block * kConfig.columns));
  }

  void read_q() {
    if constexpr (kConfig.q_in_registers) {
      const auto rows = left_rows(q_tile(), warp_index() * kConfig.warp_rows());
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 k = 0; k < kQSteps; ++k) {
          const ptx::U32x4 x = ptx::ldmatrix_x4(rows.at(k, 16 * t));
#pragma unroll
          for (i32 w = 0; w < 4; ++w) rQ[t][k][w] = x.word[w];
        }
      }
    }
  }

  // S = Q K^T
  void multiply_q_k(Scores& S, i32 stage) const {
    const auto keys = right_rows(k_tile(stage));
    if constexpr (kConfig.q_in_registers) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kConfig.columns / 2; ++i) S[t][i] = 0;
      }
#pragma unroll
      for (i32 k = 0; k < kQSteps; ++k) {
        u32 a[kTiles][4];
#pragma unroll
        for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
          for (i32 w = 0; w < 4; ++w) a[t][w] = rQ[t][k][w];
        }
        multiply_step<kConfig>(S, a, [&](i32 n) { return ptx::ldmatrix_x4(keys.at(k, 16 * n)); });
      }
    } else {
      multiply_rows<kConfig, kConfig.d_qk>(
          S, left_rows(q_tile(), warp_index() * kConfig.warp_rows()), keys);
    }
  }

  void rescale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.d_v / 2; ++i) O[t][i] *= factor[t][i / 2 % 2];
    }
  }

  // O += P V
  void multiply_p_v(const Scores& S, i32 stage) {
    u32 P[kTiles][kConfig.columns / 4];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.columns / 4; ++i) {
        P[t][i] = ptx::pack<kConfig.dtype>(S[t][2 * i], S[t][2 * i + 1]);
      }
    }
    multiply_columns<kConfig, kConfig.d_v>(O, P, right_columns(v_tile(stage)));
  }

  // S = P, l and O follow. A full block keeps the shift that there is; where its weights outgrow
  // that, S is computed once more and the shift follows its maximum.
  void weigh(Scores& S, i64 first_column, bool is_full, i32 stage) {
    bool keeps = kConfig.keeps_shift() && is_full && !softmax.is_blind;
    float block_sum[kTiles][2];
    for (;;) {
      multiply_q_k(S, stage);
      if (kConfig.terms || kConfig.natural || !is_full) terms().apply(S, first_column, is_full);
      float factor[kTiles][2];
      if (!keeps && softmax.update(S, factor)) rescale(factor);
      softmax.exponentiate(S, block_sum);
      if (!keeps || !softmax.is_outgrown(block_sum)) break;
      keeps = false;
    }
    softmax.accumulate(block_sum);
  }

  void run() {
    if (first_row < num_rows()) {
      const BlockRange range = visible_column_blocks(
          p.mask_options, head.sequence.shape,
          {first_row, min<i64>(first_row + kConfig.rows(), num_rows())}, kConfig.columns);
      walk(range);
    }
    store();
  }

  void walk(const BlockRange& range) {
    constexpr i32 kAhead = kConfig.stages - 1;
    const i64 begin = range.visit.begin;
    const i64 end = range.visit.end;
    copy_rows<kConfig.rows(), kConfig.threads()>(
        q_tile(), RowSource(p.q, head.q_row(p.q, 0), num_rows(), p.dim_qk),
        static_cast<i32>(first_row));
    fetch_k(begin, end, 0);
    ptx::cp_async_commit();
    fetch_v(begin, end, 0);
    ptx::cp_async_commit();
#pragma unroll
    for (i32 stage = 1; stage < kAhead; ++stage) {
      fetch_k(begin + stage, end, stage);
      fetch_v(begin + stage, end, stage);
      ptx::cp_async_commit();
    }
    i32 stage = 0;
#pragma unroll 1
    for (i64 block = begin; block < end; ++block) {
      const bool is_first = block == begin;
      const bool is_full = kConfig.full_blocks && range.is_full(block);
      if (is_first) {
        ptx::cp_async_wait<(kAhead > 0 ? kAhead : 1)>();
      } else {
        ptx::cp_async_wait<(kAhead > 0 ? kAhead - 1 : 0)>();
      }
      ptx::block_sync();  // block j (of the first: K) is there; all are done with block j - 1
      if (is_first) read_q();
      if (kAhead > 0) {
        const i32 free = stage == 0 ? kConfig.stages - 1 : stage - 1;
        fetch_k(block + kAhead, end, free);
        fetch_v(block + kAhead, end, free);
        ptx::cp_async_commit();
      }
      Scores S;
      weigh(S, block * kConfig.columns, is_full, stage);
      if constexpr (kConfig.dropout) terms().drop(S, block * kConfig.columns);
      if (is_first) {
        ptx::cp_async_wait<kAhead>();
        ptx::block_sync();  // V of the first block is there
      }
      multiply_p_v(S, stage);
      if (kAhead == 0) {
        ptx::block_sync();  // all are done with block j
        fetch_k(block + 1, end, 0);
        fetch_v(block + 1, end, 0);
        ptx::cp_async_commit();
      }
      stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
    }
    ptx::cp_async_wait<0>();
  }

  void store() {
    softmax.finish();
    const i64 slot = head.sequence.q_slot;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      const auto row_of = [&](i32 h) {
        return warp_row() + 16 * t + 8 * h + static_cast<i64>(lane_index() / 4);
      };
      float factor[2];
      bool repeat[2];
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const auto state = softmax.state(t, h);
        const bool counts = row_of(h) < num_rows();
        factor[h] = counts ? softmax.to_row_max(t, h) * state.normalizer(head.sink) : 0.f;
        if (head.dropout.enabled()) factor[h] *= static_cast<float>(head.dropout.kept_scale());
        repeat[h] = counts && state.row_sum - state.row_sum == 0 && !all_finite(O[t], h);
        store_statistics(row_of(h), slot, counts, state);
      }
      store_rows(O[t], row_of(0), slot, factor);
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        u32 bad = repeat[h] ? 1 : 0;
        bad |= ptx::shuffle_xor(bad, 1);
        bad |= ptx::shuffle_xor(bad, 2);
        if (bad != 0) repeat_row(row_of(h));
      }
    }
  }

  static bool all_finite(const float (&row)[kConfig.d_v / 2], i32 h) {
    float sum = 0;  // of x - x: 0, or NaN
#pragma unroll
    for (i32 i = 2 * h; i < kConfig.d_v / 2; i += 4)
      sum += (row[i] - row[i]) + (row[i + 1] - row[i + 1]);
    return sum == 0;
  }

  // The quad shares the row's dimensions.
  void repeat_row(i64 i) const {
    const i64 first = first_dim / kNaiveChunk;
    const i64 last = min(num_chunks(p.dim_v), ceil_div(first_dim + kConfig.d_v, kNaiveChunk));
    for (i64 chunk = first + lane_index() % 4; chunk < last; chunk += 4) {
      naive_chunk(p, {head.sequence.batch, head.head, head.sequence.q_begin + i, chunk});
    }
  }
  __attribute__((noinline)) static void naive_chunk(const AttentionParams& p, const RowTask& task) {
    forward_naive_row<kConfig.dtype>(p, task);
  }

  void store_statistics(i64 i, i64 slot, bool counts,
                        const typename WarpSoftmax<kConfig>::State& state) const {
    if (first_dim != 0 || lane_index() % 4 != 0 || i >= slot) return;
    const typename WarpSoftmax<kConfig>::State empty{};
    const auto& kept = counts ? state : empty;
    if (p.lse.present()) store_real(p.lse, head.q_row(p.lse, i), kept.lse());
    if (!p.stats.present()) return;
    store_real(p.stats, head.q_row(p.stats, i), kept.row_max);
    store_real(p.stats, head.q_row(p.stats, i) + p.stats.strides[3], kept.row_sum);
  }

  // Rows i and i + 8, from dimension first_dim on.
  void store_rows(float (&tile)[kConfig.d_v / 2], i64 i, i64 slot, const float (&factor)[2]) const {
#pragma unroll
    for (i32 at = 0; at < kConfig.d_v / 2; ++at) {
      const float x = tile[at] * factor[at / 2 % 2];
      tile[at] = factor[at / 2 % 2] == 0 ? 0.f : x;
    }
    const i64 dims = p.dim_v - first_dim;
    const i64 offset = head.q_row(p.o, i) + first_dim * p.o.strides[3];
    const bool in_units = p.o.dtype == kConfig.dtype && p.o.strides[3] == 1 &&
                          p.o.strides[2] % 8 == 0 && dims % 8 == 0 &&
                          reinterpret_cast<u64>(p.o.data + offset * 2) % 16 == 0;
    if constexpr (kConfig.d_v % 32 == 0) {
      if (!ptx::any(!in_units)) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          u16* const out = reinterpret_cast<u16*>(p.o.data) + offset + 8 * h * p.o.strides[2];
          store_output_row<kConfig.dtype>(tile, h, out, i + 8 * h < slot, static_cast<i32>(dims));
        }
        return;
      }
    }
    store_numbers(tile, i, slot, offset);
  }

  // Any dtype, stride and alignment: number by number, in a loop that is not unrolled and therefore
  // reads them from memory.
  void store_numbers(const float (&tile)[kConfig.d_v / 2], i64 i, i64 slot, i64 offset) const {
    float numbers[kConfig.d_v / 2];
#pragma unroll
    for (i32 at = 0; at < kConfig.d_v / 2; ++at) numbers[at] = tile[at];
#pragma unroll 1
    for (i32 at = 0; at < kConfig.d_v / 2; ++at) {
      const i32 further = 8 * (at / 2 % 2);
      const i64 d = WarpTerms<kConfig>::column(at / 4 * 4) + at % 2;
      if (i + further >= slot || first_dim + d >= p.dim_v) continue;
      store_real(p.o, offset + further * p.o.strides[2] + d * p.o.strides[3], numbers[at]);
    }
  }
};

template <Sm80Config kConfig>
void forward_sm80(const Sm80Params& params) {
  const AttentionParams& p = params.attention;
  const HeadBlock block = head_block(params, ptx::block_index(), num_v_parts(p, kConfig.d_v),
                                     num_tile_slots(p, p.q_rows, kConfig.rows()));
  const TilePlace place = find_tile(p, p.cu_q, block.task, kConfig.rows());
  const Head<kConfig.dtype> head(p, place.index, block.task.head);
  if (place.first_row >= head.sequence.q_slot) return;
  ForwardSm80<kConfig>(head, place.first_row, block.part * kConfig.d_v).run();
}

}  // namespace fulmen
