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
#include "kernels/faults.cuh"
#include "kernels/forward_naive.cuh"
#include "kernels/tile/copy.cuh"
#include "kernels/tile/documents.cuh"
#include "kernels/tile/float32_output.cuh"
#include "kernels/tile/float32_products.cuh"
#include "kernels/tile/head_order.cuh"
#include "kernels/tile/pair_tiles.cuh"
#include "kernels/tile/row_limits.cuh"
#include "kernels/tile/warp_output.cuh"
#include "kernels/tile/warp_softmax.cuh"
#include "kernels/tile/warp_terms.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardSm80 {
  using HeadType = Head<kConfig.dtype>;
  static constexpr bool kIsFloat32 = kConfig.dtype == DType::kFloat32;
  using QTile = SwizzledTile<kConfig.words(kConfig.d_qk), kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), kConfig.swizzle>;
  template <i32 kRows, i32 kDims>
  using Copy = TileCopy<kConfig.units, kRows, kConfig.threads(), kConfig.words(kDims),
                        kConfig.swizzle, kConfig.element_bytes()>;
  static constexpr i32 kTiles = kConfig.row_tiles;
  static constexpr i32 kColumns = kConfig.columns;
  static constexpr i32 kAhead = kConfig.stages - 1;
  static constexpr i32 kQSteps = kConfig.q_in_registers ? kConfig.words(kConfig.d_qk) / 16 : 1;
  using Scores = float[kTiles][kColumns / 2];
  static_assert(kConfig.valid());

  const AttentionParams& p;
  const HeadType& head;
  i32 first_row;  // of the block, in its sequence
  i32 first_dim;  // of V and O
  Copy<kColumns, kConfig.d_qk> k_copy;
  Copy<kColumns, kConfig.d_v> v_copy;
  u32 shared = ptx::dynamic_shared();
  u32 rQ[kTiles][kQSteps][4];
  float O[kTiles][kConfig.d_v / 2];
  WarpSoftmax<kConfig> softmax;
  RowLimits<kConfig> limits;
  PairTiles<kConfig> pairs;
  Documents<kConfig> documents;

  ForwardSm80(const HeadType& head_, i64 first_row_, i64 first_dim_)
      : p(head_.p),
        head(head_),
        first_row(static_cast<i32>(first_row_)),
        first_dim(static_cast<i32>(first_dim_)),
        k_copy(p.k, head.kv_row(p.k, 0), head.sequence.shape.kv_len, p.dim_qk),
        v_copy(p.v, head.kv_row(p.v, 0) + first_dim * p.v.strides[3], head.sequence.shape.kv_len,
               p.dim_v - first_dim),
        softmax(static_cast<float>(p.score_map.scale)),
        pairs(head_, first_row, shared + kConfig.pairs_at()),
        documents(head_, first_row,
                  shared + kConfig.pairs_at() + kConfig.mask_bytes() + kConfig.bias_bytes(),
                  kConfig.pair_bytes(), shared + kConfig.own_ids_at()) {}

  i32 warp_row() const { return first_row + static_cast<i32>(warp_index()) * kConfig.warp_rows(); }
  i32 num_rows() const { return head.sequence.shape.q_len; }

  QTile q_tile() const { return {shared}; }
  QTile k_tile(i32 stage) const { return {shared + kConfig.q_bytes() + stage * kConfig.k_bytes()}; }
  VTile v_tile(i32 stage) const {
    return {shared + kConfig.q_bytes() + kConfig.stages * kConfig.k_bytes() +
            stage * kConfig.v_bytes()};
  }
  WarpTerms<kConfig> terms() const { return {head, warp_row(), 0}; }

  // Start the copies of the next block of keys and of what belongs to its pairs, or of its values,
  // if there is one.
  void fetch_k(i32 block, i32 begin, i32 stage) {
    if (block < begin) return;
    k_copy.start_next(k_tile(stage));
    pairs.start(stage, block * kColumns);
    documents.start(stage, block * kColumns);
  }
  void fetch_v(i32 block, i32 begin, i32 stage) {
    if (block >= begin) v_copy.start_next(v_tile(stage));
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
    if constexpr (kIsFloat32) {
      const auto rows = left_rows(q_tile(), warp_index() * kConfig.warp_rows());
      const auto left = [&](i32 k, i32 t) {
        if constexpr (kConfig.q_in_registers) {
          return ptx::U32x4{{rQ[t][k][0], rQ[t][k][1], rQ[t][k][2], rQ[t][k][3]}};
        } else {
          return ptx::ldmatrix_x4(rows.at(k, 16 * t));
        }
      };
      multiply_rows_float32<kConfig, kConfig.d_qk>(S, left, keys);
    } else if constexpr (kConfig.q_in_registers) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kColumns / 2; ++i) S[t][i] = 0;
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
    if constexpr (kIsFloat32) {
      multiply_columns_float32<kConfig>(O, S, v_tile(stage));
    } else {
      multiply_rounded_p_v(S, stage);
    }
  }
  void multiply_rounded_p_v(const Scores& S, i32 stage) {
    u32 P[kTiles][kColumns / 4];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kColumns / 4; ++i) {
        P[t][i] = ptx::pack<kConfig.dtype>(S[t][2 * i], S[t][2 * i + 1]);
      }
    }
    multiply_columns<kConfig, kConfig.d_v>(O, P, right_columns(v_tile(stage)));
  }

  // A block that every row of the warp sees whole, with the shift that there is: no maximum, no
  // rescale, nothing that keeps exponents from running under the products. False, and nothing done,
  // where weights outgrow the 16-bit type that way.
  bool step_with_shift(i32 first_column, i32 stage) {
    Scores S;
    multiply_q_k(S, stage);
    terms().map(S, first_column);
    pairs.template apply<false>(S, stage);
    float block_sum[kTiles][2];
    softmax.exponentiate(S, block_sum, true);
    if (!kConfig.checks_at_end() && softmax.is_outgrown(block_sum)) return false;
    softmax.accumulate(block_sum);
    softmax.has_kept = true;
    if constexpr (kConfig.dropout) terms().drop(S, first_column);
    multiply_p_v(S, stage);
    settle();
    return true;
  }

  // Any block.
  void step(i32 first_column, i32 stage, bool is_first) {
    Scores S;
    multiply_q_k(S, stage);
    if (is_first) wait_for_v();
    terms().map(S, first_column);
    pairs.template apply<true>(S, stage);
    documents.hide(S, stage);
    if (!(kConfig.full_blocks && limits.is_full(first_column))) limits.hide(S, first_column);
    float factor[kTiles][2];
    if (softmax.update(S, factor)) rescale(factor);
    float block_sum[kTiles][2];
    softmax.exponentiate(S, block_sum, false);
    softmax.accumulate(block_sum);
    if constexpr (kConfig.dropout) terms().drop(S, first_column);
    multiply_p_v(S, stage);
  }

  void settle() {
    float factor[kTiles][2];
    if (kConfig.settles() && softmax.settle(factor)) rescale(factor);
  }

  void wait_for_v() const {
    ptx::cp_async_wait<kAhead>();
    ptx::block_sync();  // V of the first block is there
  }

  void run() {
    u32 spoiled = 0;
    if (first_row < num_rows()) {
      Copy<kConfig.rows(), kConfig.d_qk>(p.q, head.q_row(p.q, 0), num_rows(), p.dim_qk)
          .start(q_tile(), first_row);
      const Interval visit = visited_blocks();
      const i32 begin = static_cast<i32>(visit.begin);
      const i32 end = static_cast<i32>(visit.end);
      const u32 again = shared + kConfig.limits_at() + kConfig.limit_bytes();
      if (ptx::thread_index() == 0) ptx::store_shared(again, 0);
#pragma unroll 1
      for (bool may_keep = kConfig.lazy_max;; may_keep = false) {
        walk(begin, end, may_keep);
        spoiled = spoiled_rows();
        if (!kConfig.walks_twice() || !may_keep || begin >= end) break;
        if (ptx::any(spoiled != 0) && lane_index() == 0) ptx::store_shared(again, 1);
        ptx::block_sync();
        if (ptx::load_shared(again) == 0) break;
      }
    }
    store(spoiled);
  }

  // Blocks of keys that some row of the block sees.
  Interval visited_blocks() const {
    const Interval rows{first_row, min(first_row + kConfig.rows(), num_rows())};
    const Interval visit =
        visible_column_blocks(p.mask_options, head.sequence.shape, rows, kColumns).visit;
    if constexpr (!kConfig.documents) return visit;
    const Interval keys = documents.hull(
        {visit.begin * kColumns, min(visit.end * kColumns, i64{head.sequence.shape.kv_len})});
    return {keys.begin / kColumns, ceil_div(keys.end, i64{kColumns})};
  }

  // From the last block to the first: under a causal mask the partial ones come first, and every
  // row has its shift from them.
  void walk(i32 begin, i32 end, bool may_keep) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.d_v / 2; ++i) O[t][i] = 0;
    }
    const i32 last = end - 1;
    k_copy.seek(last * kColumns);
    v_copy.seek(last * kColumns);
    fetch_k(last, begin, 0);
    ptx::cp_async_commit();
    fetch_v(last, begin, 0);
    ptx::cp_async_commit();
#pragma unroll
    for (i32 stage = 1; stage < kAhead; ++stage) {
      fetch_k(last - stage, begin, stage);
      fetch_v(last - stage, begin, stage);
      ptx::cp_async_commit();
    }
    documents.find();
    limits.find(p.mask_options, head.sequence.shape, warp_row(), shared + kConfig.limits_at());
    softmax.start(num_rows() - warp_row() - static_cast<i32>(lane_index() / 4));
    i32 stage = 0;
#pragma unroll 1
    for (i32 block = last; block >= begin; --block) {
      const bool is_first = block == last;
      if (is_first) {
        ptx::cp_async_wait<(kAhead > 0 ? kAhead : 1)>();
      } else {
        ptx::cp_async_wait<(kAhead > 0 ? kAhead - 1 : 0)>();
      }
      ptx::block_sync();  // block j (of the first: K) is there; all are done with block j + 1
      if (is_first) read_q();
      if (kAhead > 0) {
        const i32 free = stage == 0 ? kConfig.stages - 1 : stage - 1;
        fetch_k(block - kAhead, begin, free);
        fetch_v(block - kAhead, begin, free);
        ptx::cp_async_commit();
      }
      const i32 first_column = block * kColumns;
      documents.look(stage);
      const bool keeps = may_keep && kConfig.full_blocks && softmax.may_keep() &&
                         limits.is_full(first_column) && documents.is_full();
      if (!keeps || !step_with_shift(first_column, stage)) {
        if (limits.sees(first_column) && documents.sees()) {
          step(first_column, stage, is_first);
        } else if (is_first) {
          wait_for_v();
        }
      }
      if (kAhead == 0) {
        ptx::block_sync();  // all are done with block j
        fetch_k(block - 1, begin, 0);
        fetch_v(block - 1, begin, 0);
        ptx::cp_async_commit();
      }
      stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
    }
    ptx::cp_async_wait<0>();
    if (begin >= end) ptx::block_sync();  // Q is there, over which O goes
  }

  // Rows of this thread whose result cannot be trusted, bit 2 t + h: sums that left their range, O
  // that is infinite or NaN.
  u32 spoiled_rows() const {
    u32 spoiled = 0;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const bool counts = warp_row() + WarpTerms<kConfig>::row(t, h) < num_rows();
        if (counts && (softmax.is_lost(t, h) || !all_finite(O[t], h))) spoiled |= 1u << (2 * t + h);
      }
    }
    return spoiled;
  }

  // A lane of a quad finishes one of its rows, number lane % 4, and hands the others its factor.
  void store(u32 spoiled) {
    softmax.finish();
    const i32 own = static_cast<i32>(lane_index() % (2 * kTiles));
    const i64 i = warp_row() + WarpTerms<kConfig>::row(own / 2, own % 2);
    const bool counts = i < num_rows();
    const auto row = softmax.row(own);
    const auto state = row.state();
    float factor = row.to_row_max() * state.normalizer(head.sink);
    if (kConfig.dropout) factor *= static_cast<float>(head.dropout.kept_scale());
    store_statistics(i, counts, state);
    // Something hidden is infinite or NaN: the sum does not show it.
    spoiled |= ptx::shuffle_xor(spoiled, 1);
    spoiled |= ptx::shuffle_xor(spoiled, 2);
    const bool repeat =
        counts && (spoiled >> own & 1) != 0 && (kIsFloat32 || state.row_sum - state.row_sum == 0);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      const float factors[2] = {quad_value(factor, 2 * t), quad_value(factor, 2 * t + 1)};
#pragma unroll
      for (i32 at = 0; at < kConfig.d_v / 2; ++at) O[t][at] *= factors[at / 2 % 2];
    }
    if constexpr (kIsFloat32) {
      Float32Output<kConfig>{head, warp_row(), first_dim}.store(O);
    } else {
      WarpOutput<kConfig>{head, warp_row(), first_dim, shared}.store(O);
    }
    if (!ptx::any(repeat)) return;
    ptx::warp_sync();  // what the warp wrote is there to be written over
    if (repeat && lane_index() % 4 == static_cast<u32>(own)) repeat_row(i);
  }

  // That of lane `lane` of the quad.
  static float quad_value(float x, i32 lane) {
    const i32 from = static_cast<i32>(lane_index() / 4 * 4) + lane;
    return __builtin_bit_cast(float,
                              ptx::shuffle(__builtin_bit_cast(i32, x), static_cast<u32>(from)));
  }

  static bool all_finite(const float (&row)[kConfig.d_v / 2], i32 h) {
    float sum = 0;  // infinities and NaN stay; an overflow of its own costs a repetition
#pragma unroll
    for (i32 i = 2 * h; i < kConfig.d_v / 2; i += 4) sum += row[i] + row[i + 1];
    return sum - sum == 0;
  }

  void repeat_row(i64 i) const {
    const i64 last = min(num_chunks(p.dim_v), ceil_div(first_dim + kConfig.d_v, kNaiveChunk));
    for (i64 chunk = first_dim / kNaiveChunk; chunk < last; ++chunk) {
      naive_chunk(p, {head.sequence.batch, head.head, head.sequence.q_begin + i, chunk});
    }
  }
  __attribute__((noinline)) static void naive_chunk(const AttentionParams& p, const RowTask& task) {
    forward_naive_row<kConfig.dtype>(p, task);
  }

  void store_statistics(i64 i, bool counts,
                        const typename WarpSoftmax<kConfig>::State& state) const {
    if (first_dim != 0 || lane_index() % 4 >= 2 * kTiles || i >= head.sequence.q_slot) return;
    const typename WarpSoftmax<kConfig>::State empty{};
    const auto& kept = counts ? state : empty;
    if (p.lse.present()) store_float(p.lse, head.q_row(p.lse, i), kept.lse());
    if (kConfig.stats && p.stats.present()) {
      store_float(p.stats, head.q_row(p.stats, i), kept.row_max);
      store_float(p.stats, head.q_row(p.stats, i) + p.stats.strides[3], kept.row_sum);
    }
  }
  static void store_float(const ArrayView& array, i64 offset, float x) {
    store_element(array.data + offset * 4, x);
  }
};

template <Sm80Config kConfig>
void forward_sm80(const Sm80Params& params) {
  const AttentionParams& p = params.attention;
  if (p.rng != nullptr || p.packed || p.q_lengths.present() || p.kv_lengths.present()) {
    record_faults(p, kConfig.threads());
  }
  const HeadBlock block = params.order.at(ptx::block_index());
  const TilePlace place = find_tile(p, p.cu_q, block.task, kConfig.rows());
  const Head<kConfig.dtype> head(p, place.index, block.task.head, block.kv_head);
  if (place.first_row >= head.sequence.q_slot) return;
  ForwardSm80<kConfig>(head, place.first_row, block.part * kConfig.d_v).run();
}

}  // namespace fulmen
