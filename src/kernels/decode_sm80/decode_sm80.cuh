// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention of few query rows on the tensor cores of every GPU since Ampere, at the speed at which
// K and V are read: FlashDecoding (Dao, Haziza, Massa, Sizov, 2023). A fixed grid divides the
// blocks of keys of all sequences evenly, by their true lengths; query rows of all heads that share
// K and V are the rows of one tile. The splits of a block have keys, a ring of stages in shared
// memory and a softmax of their own, and meet only at the end of a row tile. A row tile whose keys
// several blocks have leaves at most two parts a block, which the last of them adds.
//
// The blocks of a cluster work as one: all of this is then true of clusters instead of blocks, and
// their splits meet at the end of a row tile through distributed shared memory.
#pragma once

#include "kernels/decode_sm80/consumer.cuh"
#include "kernels/decode_sm80/empty_rows.cuh"
#include "kernels/decode_sm80/epilogue.cuh"
#include "kernels/decode_sm80/producer.cuh"
#include "kernels/decode_sm80/result.cuh"
#include "kernels/decode_sm80/scheduler.cuh"

namespace fulmen {

template <DecodeSm80Config kConfig>
struct DecodeSm80 {
  const DecodeSm80Params& params;
  const AttentionParams& p = params.attention;
  u32 shared = ptx::dynamic_shared();
  i32 cluster = static_cast<i32>(ptx::block_index()) / kConfig.cluster;
  i32 row_tile = kConfig.whole ? 0 : cluster % params.row_tiles;
  DecodeEpilogueSm80<kConfig> epilogue{params, shared, row_tile};
  EmptyRows<kConfig> empty{p, params.unit, params.group, row_tile};
  QueryRows rows = kConfig.one_query
                       ? QueryRows{0, 0}
                       : QueryRows{row_tile * kConfig.rows() / params.group,
                                   (row_tile * kConfig.rows() + kConfig.rows() - 1) / params.group};

  void run() {
    if constexpr (kConfig.whole) return attend_whole();
    KeyCounts<kConfig, kConfig.threads()> counts(p, rows, shared + kConfig.words_at());
    const KeyShares shares(counts.of_head() * static_cast<i32>(p.heads_kv) / kConfig.heads,
                           workers());
    if (worker() < shares.num_workers && shares.num_chunks > 0) attend_share(counts, shares);
    if constexpr (kConfig.placed) record_position_faults<AlignedIndex>(p, kConfig.threads());
    if (cluster_rank<kConfig>() != 0) return;
    if (counts.has_empty()) {
      empty.clear_sequences(counts, worker(), workers(), kConfig.warps());
    }
    if (p.packed.q && row_tile == 0 && worker() == 0) empty.clear_rest();
  }

 private:
  i32 worker() const { return cluster / params.row_tiles; }
  // Beside chunks of prompts those of a part of the card; all, where every request may be one of
  // few rows: blocks of the other kernel that find no work leave at once.
  i32 workers() const {
    if constexpr (kConfig.mixed) {
      const i64 all_rows = AlignedIndex::load(p.cu_q, p.num_sequences * p.cu_q.strides[3]);
      const i32 group = params.group / kConfig.heads;
      if (all_rows * group > p.num_sequences * kFewRows) return params.workers_beside;
    }
    return static_cast<i32>(ptx::num_blocks()) / kConfig.cluster / params.row_tiles;
  }

  // A row tile of a sequence. Neighbours begin together, and so read neighbouring heads of a token
  // at about the same time.
  void attend_whole() {
    const i32 head_tiles = static_cast<i32>(p.heads_kv) / kConfig.heads;
    const i32 index = head_tiles == 1 ? cluster : cluster / head_tiles;
    const i32 kv_head = cluster - index * head_tiles;
    KeyCursor<kConfig> cursor{&p, rows, {}, kv_head, index, 0, {}, {}};
    cursor.sequence = decode_sequence<kConfig>(p, cursor.index);
    cursor.blocks = chunked_blocks<kConfig>(p, cursor.sequence, rows);
    if (cursor.blocks.count > 0) attend(KeyShares(1, 1), cursor, 0, cursor.blocks.num_chunks(), 0);
    if (cluster_rank<kConfig>() != 0) return;
    if (cursor.blocks.count == 0 && warp_index() == 0) {
      empty.clear(row_tile, kv_head, cursor.index, cursor.sequence);
    }
    if (ptx::thread_index() == 0) report(p.faults, cursor.sequence.faults);
  }

  void attend_share(KeyCounts<kConfig, kConfig.threads()>& counts, const KeyShares& shares) {
    const i32 of_head = counts.of_head();
    const i32 begin = shares.begin(worker());
    const i32 end = shares.begin(worker() + 1);
    KeyCursor<kConfig> cursor{&p, rows, {}, begin / of_head, 0, 0, {}, {}};
    // Number of the first chunk of the row tile that the cursor is in.
    const i32 tile_begin = begin - begin % of_head + counts.seek(cursor, begin % of_head);
    attend(shares, cursor, begin, end, tile_begin);
  }

  // Chunks [begin, end), from the cursor on, in a row tile whose first chunk is `tile_begin`.
  void attend(const KeyShares& shares, KeyCursor<kConfig>& cursor, i32 begin, i32 end,
              i32 tile_begin) {
    DecodeProducerSm80<kConfig> ring(params, cursor, shared, end - begin);
#pragma unroll 1
    for (i32 stage = 0; stage < kConfig.stages; ++stage) {  // once in the text, which is fetched
      ring.fetch_k(stage);
      ring.fetch_v(stage);
    }
    epilogue.join_cluster();
    if constexpr (!kConfig.whole) epilogue.start(parts_of(shares, cursor, tile_begin, begin));
    DecodeConsumerSm80<kConfig> consumer{params};
    consumer.start(RowTile<kConfig>(params, row_tile, cursor));
    i32 stage = 0;
#pragma unroll 1
    for (i32 chunk = begin;;) {
      float S[DecodeConsumerSm80<kConfig>::kFloats];
      ring.wait_for_k(stage);
      consumer.is_bad |= ring.is_bad(stage);
      consumer.products.multiply_q_k(S, ring.k_tile(stage));
      if constexpr (kConfig.scaled) consumer.scale(S, ring.k_scales(stage));
      Split<kConfig>::sync();  // K was read
      ring.fetch_k(stage);
      consumer.softmax(S, cursor.first_key(Split<kConfig>::of_keys()));
      ring.wait_for_v(stage, cursor);
      if constexpr (kConfig.scaled) consumer.scale_weights(S, ring.v_scales(stage));
      consumer.products.multiply_p_v(S, ring.v_tile(stage));
      Split<kConfig>::sync();  // V was read
      ring.fetch_v(stage);
      stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
      if (!cursor.blocks.begins_chunk(++cursor.block)) continue;
      const bool ends_tile = cursor.block == cursor.blocks.count;
      const i32 ended = chunk++;
      if (!kConfig.has_chunks() && chunk < end && !ends_tile) continue;
      DecodeParts parts = parts_of(shares, cursor, tile_begin, ended);
      if constexpr (kConfig.has_chunks()) {
        parts.brought = ends_tile || chunk == end ? chunk - max(begin, tile_begin) : 0;
      }
      epilogue.leave(consumer, RowTile<kConfig>(params, row_tile, cursor), parts);
      if (kConfig.whole || chunk == end) break;
      epilogue.release();
      if (ends_tile) {
        tile_begin += cursor.blocks.num_chunks();
        cursor.next_tile();
        if (kConfig.has_chunks()) epilogue.start(parts_of(shares, cursor, tile_begin, chunk));
      }
      consumer.start(RowTile<kConfig>(params, row_tile, cursor));
    }
  }

  // Of the row tile that the cursor is in, whose first chunk is `tile_begin`; own: with this chunk.
  DecodeParts parts_of(const KeyShares& shares, const KeyCursor<kConfig>& cursor, i32 tile_begin,
                       i32 chunk) const {
    if constexpr (kConfig.whole) return {};
    const i32 tile_last = tile_begin + cursor.blocks.num_chunks() - 1;
    if constexpr (kConfig.has_chunks()) return {chunk, tile_begin, tile_last};
    return {worker(), shares.owner(tile_begin), shares.owner(tile_last)};
  }
};

template <DecodeSm80Config kConfig>
void decode_sm80(const DecodeSm80Params& params) {
  if constexpr (kConfig.mixed) ptx::grid_dependents_launch();  // the kernel beside this one
  DecodeSm80<kConfig>{params}.run();
}

}  // namespace fulmen
