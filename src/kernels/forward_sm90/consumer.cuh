// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a consumer warpgroup of forward_sm90 holds apart from the algorithm: its pipeline states,
// named barriers (ping-pong, warpgroup, all consumers), and which keys its 64 query rows see; and
// its epilogue.
#pragma once

#include "kernels/attention/kv_scale.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/common/products_sm90.cuh"
#include "kernels/common/scores_sm90.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/forward_sm90/partner.cuh"
#include "kernels/forward_sm90/producer.cuh"
#include "kernels/forward_sm90/softmax.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

template <ForwardSm90Config kConfig>
struct ForwardWarpgroup : ConsumerThread<kConfig.warpgroups, kConfig.ping_pong> {
  using Thread = ConsumerThread<kConfig.warpgroups, kConfig.ping_pong>;
  using Thread::first_column, Thread::first_row, Thread::kPingPong, Thread::sync_warpgroup,
      Thread::thread, Thread::warpgroup;
  using Shared = ForwardStorage<kConfig>;
  using Scores = float[kConfig.score_floats()];

  const ForwardTensorMaps& maps;
  const ForwardParams& params;
  Shared shared;
  typename Shared::QState q_at;
  typename Shared::KvState k_at, v_at;
  PairTileReader<kConfig> pair_tiles{shared};
  Partner<kConfig> partner{shared};
  InlineProducer<kConfig> inline_producer{{maps, params, shared}};

  // Only warpgroup 0 waits for K and V to land; the ping-pong barriers carry that to the others
  // (measured: 3 to 4 % at d 128).
  bool waits_for_data() const { return !kPingPong || warpgroup == 0; }

  // The 64 rows of a warpgroup: of each of its heads those from `row` on in the sequence.
  struct Work {
    QueryBlock block;
    i32 row;
    u32 count;  // number of the work tile
  };
  // Read from shared memory wherever it is needed: that costs less than registers.
  SeqlenInfo seqlen_info(const Work& work) const {
    return read_seqlen_info(shared, params, work.block, work.count);
  }

  void release_q() {
    if constexpr (Shared::kRotatesQ) {
      release_every_q();
    } else {
      if (thread == 0) shared.q().consumer_release(q_at);
    }
    q_at.advance(kConfig.q_tiles());
  }
  // All tiles of Q of the work tile, after they have landed.
  void release_every_q() const {
    typename Shared::QState first = q_at;
    first.advance(kConfig.num_q_slots() - warpgroup);
    first.phase ^= 1;  // a round forward and back
    auto at = first;
    for (i32 w = 0; w < kConfig.q_tiles(); ++w, at.advance()) shared.q().consumer_wait(at);
    sync_warpgroup();
    at = first;
    for (i32 w = 0; thread == 0 && w < kConfig.q_tiles(); ++w, at.advance()) {
      shared.q().consumer_release(at);
    }
  }
  void release_k() {
    const u32 of = kConfig.score.has_tile_lists() ? thread % 32 : thread;
    if (of == 0) shared.k().consumer_release(k_at);
    advance_k();
  }
  void release_v() {
    if (thread == 0) shared.v().consumer_release(v_at);
    advance_v();
  }
  void advance_k() {
    k_at.advance();
    ++inline_producer.free_k;
  }
  void advance_v() {
    v_at.advance();
    ++inline_producer.free_v;
  }

  // Without a producer warp: the first loads of a work tile, and before each use of a tile loads
  // into the buffers that were released.
  void begin_producing(const Work& work, const KeyBlocks& blocks) {
    if constexpr (kConfig.specialised) return;
    inline_producer.begin(work.block, seqlen_info(work), blocks.all_begin, blocks.all_end - 1);
    if (warpgroup == 0 && thread == 0)
      inline_producer.producer.load_q(work.block, inline_producer.seqlen);
    ptx::warp_sync();
  }
  void produce() {
    if constexpr (kConfig.specialised) return;
    if (warpgroup == 0 && thread == 0) inline_producer.produce();
    ptx::warp_sync();
  }

  // The first of the columns of V and O that this warpgroup computes: of a tile of V, of all.
  i32 first_tile_dim() const { return kConfig.split_dims ? i32(warpgroup) * kConfig.o_dims() : 0; }
  i32 first_dim() const { return first_tile_dim() + pair_rank<kConfig>() * kConfig.o_dims(); }
  u32 v_tile() const { return shared.v().address(v_at) + first_tile_dim() * kConfig.kv_rows * 2; }

  // Blocks of keys from j down to `begin` that only other warpgroups of this thread block see.
  void skip_blocks(i32& j, i32 begin) {
#pragma unroll 1
    for (; j >= begin; --j) {
      produce();
      pair_tiles.skip();  // before V, for which the producer may wait until it is released
      this->skip_block(shared.k(), k_at, shared.v(), v_at);
      advance_k();
      advance_v();
    }
  }

  // Row r, 0 or 1, of this thread: its number in the sequence, and its head.
  i32 q_row(const Work& work, i32 r) const {
    return work.row + (first_row() + 8 * r) % kConfig.tile_rows();
  }
  i32 head(const Work& work, i32 r) const {
    return work.block.head + (first_row() + 8 * r) / kConfig.tile_rows();
  }

  // The intervals of keys that the interval mask leaves to this thread's two rows.
  void find_visible_keys(Interval (&visible)[2], const Work& work) const {
    const SeqlenInfo seqlen = seqlen_info(work);
    for (i32 r = 0; r < 2; ++r) {
      visible[r] =
          visible_columns(effective_mask<kConfig>(params.mask), seqlen.shape, q_row(work, r));
    }
  }

  FragmentScores<kConfig> scores_of(const Work& work) const {
    const ExpressionParams* expression = nullptr;
    if constexpr (kConfig.score.user.any()) expression = &expression_of(arguments());
    return {params, seqlen_info(work), work.block, work.row + first_row(), expression};
  }
  // Of which maps are the first member.
  const ForwardArguments& arguments() const {
    return reinterpret_cast<const ForwardArguments&>(maps);
  }
  float softmax_factor() const {
    if constexpr (kConfig.scales_scores()) return kLog2E<float> / kConfig.score.per_nat();
    return params.scale_log2;
  }
  // Of e4m3, what scores are multiplied by beside that: the scales of q and k of a head, as a sign,
  // which may be 0 or NaN, and a positive number.
  struct OperandScale {
    float sign, size;
  };
  OperandScale operand_scale(const Work& work) const {
    const AttentionParams& p = params.attention;
    const SeqlenInfo seqlen = seqlen_info(work);
    float scale = 1;
    if (p.q_scale.present()) {
      scale = load_scale(p.q_scale, p.q_scale.offset(seqlen.batch, work.block.head, 0, 0));
    }
    if (p.k_scale.present()) {
      scale *= load_scale(p.k_scale, p.k_scale.offset(seqlen.batch, kv_head(work), 0, 0));
    }
    if (scale > 0) return {1, scale};
    if (scale < 0) return {-1, -scale};
    return {scale, 1};
  }
  // That size joins the factor of the softmax; the sign is left.
  float take_operand_scale(RowSoftmax<kConfig>& softmax, const Work& work) const {
    if constexpr (!kConfig.has_8_bits()) return 1;
    const OperandScale scale = operand_scale(work);
    softmax.factor *= scale.size;
    return scale.sign;
  }
  i32 kv_head(const Work& work) const {
    return work.block.head / (params.heads_q / params.heads_kv);
  }
  static float load_scale(const ArrayView& scales, i64 at) {
    return kv_scale(reinterpret_cast<const float*>(scales.data)[at]);
  }

  // Times the sign of their scale: the softmax knows positive scales alone.
  void sign_scores(Scores& S, float sign) const {
    if constexpr (!kConfig.has_8_bits()) return;
    if (sign == 1) return;
#pragma unroll
    for (i32 i = 0; i < kConfig.score_floats(); ++i) S[i] *= sign;
  }

  // S = -inf at the keys of block j outside a row's interval. kMask: which bounds can lie in it.
  template <MaskKind kMask>
  void apply_mask(Scores& S, const Interval (&visible)[2], i32 j) const {
    const i32 first_key = j * kConfig.kv_rows + pair_rank<kConfig>() * kConfig.own_keys();
    hide_keys<kConfig, kMask == MaskKind::kRight>(S, visible, first_key + first_column());
  }
};

// The epilogue: asks for the fallback where a row's result is not finite or not exact, else writes
// O, lse and stats of a warpgroup's 64 rows to global memory. Rows between a sequence's length and
// the next sequence become zeros.
template <ForwardSm90Config kConfig>
struct ForwardEpilogue {
  using Warpgroup = ForwardWarpgroup<kConfig>;
  using Work = typename Warpgroup::Work;

  const Warpgroup& wg;

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
  void request_fallback(const float (&probe)[2], const RowSoftmax<kConfig>& softmax,
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
    if (ptx::any(failed) && wg.thread % 32 == 0) {
      ptx::store_shared(wg.shared.failed(work.count), 1);
    }
  }

  // 1 / (sum of the exponentials, with that of the sink).
  float normalizer(const RowSoftmax<kConfig>& softmax, i32 r, i32 head) const {
    if (softmax.sum[r] == 0) return 0;
    float inverse = ptx::reciprocal(softmax.sum[r]);
    if constexpr (kConfig.has_8_bits()) inverse /= kUnitOf8Bits;
    if constexpr (kConfig.score.dropout) inverse *= wg.params.kept_scale;
    if constexpr (kConfig.score.sinks) {
      const ArrayView& sinks = wg.params.attention.sinks;
      const float sink = load_real<float>(sinks, sinks.offset(0, head, 0, 0)) * kLog2E<float>;
      inverse *= ptx::reciprocal(1 + ptx::exp2(sink - softmax.lse_log2(r)));
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
    scale_rows(O, inverse);
    if constexpr (kConfig.has_8_bits()) scale_columns(O, inverse, seqlen, wg.kv_head(work));
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

  // Through shared memory and TMA. kAgain: in the fallback, right after the first attempt at the
  // same rows.
  template <bool kAgain>
  void write_staged(const float (&O)[kConfig.o_dims() / 2], const Work& work) const {
    const u32 tile = wg.shared.o() + 64 * 128 * wg.warpgroup;
    constexpr u32 kChunkBytes = 64 * kConfig.q_tiles() * 128;
    if (wg.thread == 0) {  // the previous tile has left
      if (kAgain) ptx::tma_store_wait();
      ptx::tma_store_wait_read();
    }
    wg.sync_warpgroup();
    stage_output_tile<kConfig.output(), kConfig.swizzle>(O, tile, kChunkBytes);
    ptx::fence_proxy_async();
    wg.sync_warpgroup();
    if (wg.thread == 0) {
      for (i32 d = 0; d < kConfig.d_v; d += 64) {
        ptx::tma_store(wg.maps.o, tile + d / 64 * kChunkBytes, d, work.row, work.block.head,
                       work.block.batch);
      }
      ptx::tma_store_commit();
    }
  }
};

}  // namespace fulmen
