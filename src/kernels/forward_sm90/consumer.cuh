// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a consumer warpgroup of forward_sm90 holds apart from the algorithm: its pipeline states,
// named barriers (ping-pong, warpgroup, all consumers), and which keys its 64 query rows see.
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

}  // namespace fulmen
