// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of a work tile: whether the fallback must compute it again, and the way of O, lse and
// stats to global memory, or into the part of the rows that is there.
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/forward_sm90/consumer.cuh"

namespace fulmen {

// The epilogue: asks for the fallback where a row's result is not finite or not exact, else writes
// O, lse and stats of a warpgroup's 64 rows to global memory. Rows between a sequence's length and
// the next sequence become zeros.
template <ForwardSm90Config kConfig>
struct ForwardEpilogue {
  using Warpgroup = ForwardWarpgroup<kConfig>;
  using Work = typename Warpgroup::Work;

  const Warpgroup& wg;

  // O, lse and stats to memory, or into the part of the rows that is there. failed: of the first
  // attempt whether a row of the warp did; of the fallback the warps of which one did, which alone
  // have not merged their rows.
  template <bool kExactly>
  void finish(float (&O)[kConfig.o_dims() / 2], const RowSoftmax<kConfig>& softmax,
              const Work& work, u32 failed) const {
    if constexpr (kConfig.score.accumulate) {
      join<kExactly>(O, softmax, work, kExactly ? (failed & warp_bit()) != 0 : failed == 0);
    } else {
      write<kExactly>(O, softmax, work);
    }
  }

  // 0, or NaN if an element of the row is inf or NaN.
  static void probe_rows(float (&probe)[2], const float (&O)[kConfig.o_dims() / 2]) {
    probe[0] = probe[1] = 0;
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; ++i) {
      probe[i / 2 % 2] = ptx::fma(O[i], 0.f, probe[i / 2 % 2]);
    }
  }

  // Sends the work tile to the fallback if a row left the range of float32 or is not finite.
  // saw_whole: with lists of tiles, whether the rows saw a block whole; if not, a row without a
  // maximum saw no key. probe: of the rows.
  // Returns whether one of the warp's did.
  bool request_fallback(const float (&probe)[2], const RowSoftmax<kConfig>& softmax,
                        const Interval (&visible)[2], bool saw_whole, const Work& work) const {
    const i32 q_len = wg.seqlen_info(work).shape.q_len;
    bool failed = false;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const bool counts = wg.q_row(work, r) < q_len;
      bool in_range = visible[r].size() == 0 || softmax.in_range(r);
      if constexpr (kConfig.score.has_tile_lists()) {
        in_range |= !saw_whole && softmax.row_max[r] == -kInfinity<float>;
      }
      failed = failed || (counts && !(in_range && probe[r] == 0));
    }
    failed = ptx::any(failed);
    if (failed && wg.thread % 32 == 0) ptx::or_shared(wg.shared.failed(work.count), warp_bit());
    return failed;
  }
  u32 warp_bit() const { return 1u << (4 * wg.warpgroup + wg.thread / 32); }

  // Natural, as arrays have it.
  float sink(i32 head) const {
    if constexpr (!kConfig.score.sinks) return -kInfinity<float>;
    const ArrayView& sinks = wg.params.attention.sinks;
    return load_real<float>(sinks, sinks.offset(0, head, 0, 0));
  }

  // 1 / (sum of the exponentials, with that of the sink, which `join` adds where a part is there).
  float normalizer(const RowSoftmax<kConfig>& softmax, i32 r, i32 head) const {
    if (softmax.sum[r] == 0) return 0;
    float inverse = ptx::reciprocal(softmax.sum[r]);
    if constexpr (kConfig.has_8_bits()) inverse /= kUnitOf8Bits;
    if constexpr (kConfig.score.dropout) inverse *= wg.params.kept_scale;
    if constexpr (kConfig.score.sinks && !kConfig.score.accumulate) {
      const float sink_log2 = sink(head) * kLog2E<float>;
      inverse *= ptx::reciprocal(1 + ptx::exp2(sink_log2 - softmax.lse_log2(r)));
    }
    return inverse;
  }

  // Whether a row sees a key whose entry names no page: it is empty then.
  bool sees_bad_page(const Work& work, const SeqlenInfo& seqlen, i32 q_row) const {
    if (ptx::load_shared(wg.shared.bad_page(work.count)) == 0) return false;
    const Interval visible =
        visible_columns(effective_mask<kConfig>(wg.params.mask), seqlen.shape, q_row);
    const AttentionParams& p = wg.params.attention;
    const u32 page_rows = u32(p.cache_layout.page_rows);
    const i64 entries = p.page_table.offset(work.block.batch, 0, 0, seqlen.kv_batch);
    const u32 end = u32(seqlen.kv_begin + i32(visible.end) - 1) / page_rows;
    bool found = false;
#pragma unroll 1
    for (u32 i = u32(seqlen.kv_begin + i32(visible.begin)) / page_rows; i <= end && !found; ++i) {
      found = is_bad_page(load_aligned_index(p.page_table, entries + i * p.page_table.strides[3]),
                          p.num_pages);
    }
    return found && visible.size() > 0;
  }

  // lse and stats of a row: by one thread of its quad. kExactly: in the fallback.
  template <bool kExactly>
  void write_row(const RowSoftmax<kConfig>& softmax, i32 r, const Work& work,
                 const SeqlenInfo& seqlen, i32 q_row, bool is_past_end) const {
    const auto store = [&](const ArrayView& array, i32 index, float x) {
      const i64 at = array.offset(seqlen.batch, wg.head(work, r), seqlen.q_begin + q_row, index);
      reinterpret_cast<float*>(array.data)[at] = x;
    };
    const AttentionParams& arrays = wg.params.attention;
    if (arrays.lse.present())
      store(arrays.lse, 0, is_past_end ? -kInfinity<float> : softmax.lse(r));
    if constexpr (kConfig.score.stats) {
      const auto stats = kExactly ? softmax.exact_stats(r, wg.params.scale) : softmax.stats(r);
      store(arrays.stats, 0, is_past_end ? -kInfinity<float> : stats.row_max);
      store(arrays.stats, 1, is_past_end ? 0.f : stats.row_sum);
    }
  }

  // O / sum, lse and stats, to global memory.
  template <bool kExactly>
  void write(float (&O)[kConfig.o_dims() / 2], const RowSoftmax<kConfig>& softmax,
             const Work& work) const {
    const SeqlenInfo seqlen = wg.seqlen_info(work);
    float inverse[2];
    bool is_past_end[2] = {};
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = wg.q_row(work, r);
      if constexpr (kConfig.score.varlen) is_past_end[r] = q_row >= seqlen.shape.q_len;
      if constexpr (kConfig.paged) is_past_end[r] |= sees_bad_page(work, seqlen, q_row);
      inverse[r] = normalizer(softmax, r, wg.head(work, r));
      if (wg.thread % 4 == 0 && wg.first_dim() == 0 && q_row < seqlen.q_slot) {
        write_row<kExactly>(softmax, r, work, seqlen, q_row, is_past_end[r]);
      }
    }
    if constexpr (kConfig.has_8_bits()) scale_columns(O, inverse, seqlen, wg.kv_head(work));
    if constexpr (kConfig.stage_output && kConfig.score.fp32_out) {
      return write_halves<kExactly>(work, [&](auto columns, const auto& tile) {
        stage_columns<decltype(columns)::begin, decltype(columns)::end>(O, inverse, tile);
      });
    }
    scale_rows(O, inverse);
    if constexpr (kConfig.stage_output) {
      write_staged<kExactly>(O, work);
    } else {
      write_directly(O, work, seqlen, is_past_end);
    }
  }

  // The scales of v: of a head, or of its dims. Rows that saw nothing stay 0.
  void scale_columns(float (&O)[kConfig.o_dims() / 2], const float (&inverse)[2],
                     const SeqlenInfo& seqlen, i32 kv_head) const {
    const ArrayView& scales = wg.params.attention.v_scale;
    if (!scales.present()) return;
    const i64 first = scales.offset(seqlen.batch, kv_head, 0, 0);
    const i32 dim_v = i32(wg.params.attention.dim_v);
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; i += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 dim = min(i * 2 + wg.first_column() + c, dim_v - 1);
        const float scale = wg.load_scale(scales, first + dim * scales.strides[3]);
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          if (inverse[r] != 0) O[i + 2 * r + c] *= scale;
        }
      }
    }
  }

  // From registers.
  void write_directly(float (&O)[kConfig.o_dims() / 2], const Work& work, const SeqlenInfo& seqlen,
                      const bool (&is_past_end)[2]) const {
    const ArrayView& o = wg.params.attention.o;
    const i32 dims = i32(wg.params.attention.dim_v) - wg.first_dim();
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = wg.q_row(work, r);
      const bool inside = q_row < seqlen.q_slot;
      const i64 at =
          o.offset(seqlen.batch, wg.head(work, r), seqlen.q_begin + q_row, 0) + wg.first_dim();
      if (kConfig.score.varlen && is_past_end[r]) clear_row(O, r);
      if constexpr (kConfig.score.fp32_out) {
        store_output_row(O, r, reinterpret_cast<float*>(o.data) + at, inside, dims);
      } else {
        store_output_row<kConfig.output()>(O, r, reinterpret_cast<u16*>(o.data) + at, inside, dims);
      }
    }
  }

  // Asks the L2 for the part of the rows that is in memory, as soon as they are known.
  void prefetch(const Work& work) const {
    constexpr i32 kLine = 32;  // floats
    const SeqlenInfo seqlen = wg.seqlen_info(work);
    const ArrayView& o = wg.params.attention.o;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = max(min(wg.q_row(work, r), seqlen.shape.q_len - 1), 0);
      const i64 at = o.offset(seqlen.batch, wg.head(work, r), seqlen.q_begin + q_row, 0);
#pragma unroll
      for (i32 d = 0; d < kConfig.d_v; d += 4 * kLine) {
        const i32 dim = min(d + i32(wg.thread % 4) * kLine, i32(wg.params.attention.dim_v) - 1);
        ptx::prefetch_l2(reinterpret_cast<const float*>(o.data) + at + dim);
      }
    }
  }

  // What becomes of row r, whose stats and lse are merged with the part of it that is in memory
  // (softmax_state.cuh). merges: whether this is the attempt that counts for the rows of the warp.
  template <bool kExactly>
  JoinedRow join_stats(const RowSoftmax<kConfig>& softmax, i32 r, const Work& work,
                       const SeqlenInfo& seqlen, bool merges) const {
    const AttentionParams& arrays = wg.params.attention;
    const bool inside = wg.q_row(work, r) < seqlen.shape.q_len;
    const bool counts = merges && inside && (kConfig.score.sinks || softmax.sum[r] != 0);
    const i64 row = seqlen.q_begin + wg.q_row(work, r);
    const i32 head = wg.head(work, r);
    float* const stats = reinterpret_cast<float*>(arrays.stats.data) +
                         arrays.stats.offset(seqlen.batch, head, row, 0);
    const i64 second = arrays.stats.strides[3];
    SoftmaxState<NaturalMath> part;
    if (counts) part = {stats[0], stats[second]};
    const auto own = kExactly ? softmax.exact_stats(r, wg.params.scale) : softmax.stats(r);
    SoftmaxState<NaturalMath> state{own.row_max, own.row_sum};
    const auto shares = state.join(part, sink(head));
    ptx::warp_sync();  // the quad has read stats
    if (counts && wg.thread % 4 == 0) {
      stats[0] = state.row_max;
      stats[second] = state.row_sum;
      if (arrays.lse.present()) {
        reinterpret_cast<float*>(arrays.lse.data)[arrays.lse.offset(seqlen.batch, head, row, 0)] =
            state.lse();
      }
    }
    float* const o =
        reinterpret_cast<float*>(arrays.o.data) + arrays.o.offset(seqlen.batch, head, row, 0);
    const float mine = normalizer(softmax, r, head) * own.row_sum * shares.mine;
    return {o, mine, shares.other, inside, counts};
  }

  // Merges O, stats and lse with the part of the rows that is in memory; rows that saw nothing
  // stay, but for what a sink takes. O leaves in a tile, with rows that stay as they are, the
  // fallback's from registers.
  template <bool kExactly>
  void join(float (&O)[kConfig.o_dims() / 2], const RowSoftmax<kConfig>& softmax, const Work& work,
            bool merges) const {
    const SeqlenInfo seqlen = wg.seqlen_info(work);
    if constexpr (kConfig.stage_output && kExactly) {
      if (wg.thread == 0) ptx::tma_store_wait();  // the first attempt is in memory
      wg.sync_warpgroup();
    }
    if constexpr (kConfig.has_8_bits()) scale_columns(O, {1, 1}, seqlen, wg.kv_head(work));
    const i32 dims = i32(wg.params.attention.dim_v);
    const i32 first = 2 * i32(ptx::thread_index() % 4);
    JoinedRow joined[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      joined[r] = join_stats<kExactly>(softmax, r, work, seqlen, merges);
      if constexpr (kConfig.stage_output && !kExactly) continue;
      join_output_row<0, kConfig.o_dims(), false>(
          O, r, joined[r], dims, [&](i32 column, ptx::F32x2 x) {
            if (!joined[r].inside || !joined[r].counts || column + first >= dims) return;
            ptx::store_l2_x2(joined[r].part + column + first, x);
          });
    }
    if constexpr (kConfig.stage_output && !kExactly) {
      write_halves<false>(work, [&](auto columns, const auto& tile) {
        using Half = decltype(columns);
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          join_output_row<Half::begin, Half::end, true>(
              O, r, joined[r], dims,
              [&](i32 column, ptx::F32x2 x) { tile.store(r, column - Half::begin, x); });
        }
      });
    }
  }

  // Columns of a tile.
  template <i32 kBegin, i32 kEnd>
  struct Columns {
    static constexpr i32 begin = kBegin, end = kEnd;
  };

  template <i32 kBegin, i32 kEnd, class Tile>
  void stage_columns(const float (&O)[kConfig.o_dims() / 2], const float (&factor)[2],
                     const Tile& tile) const {
#pragma unroll
    for (i32 column = kBegin; column < kEnd; column += 8) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        const i32 i = column / 2 + 2 * r;
        tile.store(r, column - kBegin, {ptx::mul(O[i], factor[r]), ptx::mul(O[i + 1], factor[r])});
      }
    }
  }

  // Float32 in two halves of the columns, since there is room for 16 bits: stage(columns, tile)
  // fills one. kAgain: as below.
  template <bool kAgain, class Stage>
  void write_halves(const Work& work, const Stage& stage) const {
    constexpr i32 kHalf = kConfig.d_v / 2;
    write_tile<kAgain, 32, kHalf>(work, 0, [&](u32 tile) {
      stage(Columns<0, kHalf>{}, FloatTile<kConfig.swizzle>{tile, kChunkBytes});
    });
    write_tile<false, 32, kHalf>(work, kHalf, [&](u32 tile) {
      stage(Columns<kHalf, kConfig.d_v>{}, FloatTile<kConfig.swizzle>{tile, kChunkBytes});
    });
  }

  template <bool kAgain>
  void write_staged(const float (&O)[kConfig.o_dims() / 2], const Work& work) const {
    write_tile<kAgain, 64, kConfig.d_v>(work, 0, [&](u32 tile) {
      stage_output_tile<kConfig.output(), kConfig.swizzle>(O, tile, kChunkBytes);
    });
  }

  // kColumns columns from `first` on, in chunks of kChunk, through shared memory and TMA. kAgain:
  // in the fallback, right after the first attempt at the same rows.
  static constexpr u32 kChunkBytes = 64 * kConfig.q_tiles() * 128;
  template <bool kAgain, i32 kChunk, i32 kColumns, class Stage>
  void write_tile(const Work& work, i32 first, const Stage& stage) const {
    const u32 tile = wg.shared.o() + 64 * 128 * wg.warpgroup;
    if (wg.thread == 0) {  // what was there has left
      if (kAgain) ptx::tma_store_wait();
      ptx::tma_store_wait_read();
    }
    wg.sync_warpgroup();
    stage(tile);
    ptx::fence_proxy_async();
    wg.sync_warpgroup();
    if (wg.thread != 0) return;
    for (i32 d = 0; d < kColumns; d += kChunk) {
      ptx::tma_store(wg.maps.o, tile + d / kChunk * kChunkBytes, first + d, work.row,
                     work.block.head, work.block.batch);
    }
    ptx::tma_store_commit();
  }
};

}  // namespace fulmen
