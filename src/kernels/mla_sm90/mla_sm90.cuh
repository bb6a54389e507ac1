// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention over a latent cache on Hopper (multi-head latent attention: DeepSeek-V2, 2024): one
// head of keys of 576 numbers, whose first 512 are the values, for all query heads. Rows of all
// heads and query positions are the rows of a tile; a fixed grid divides the blocks of keys of all
// sequences evenly (decode_sm80/scheduler.cuh). A warp copies each key once, for both products; two
// warpgroups have half of the keys of a block for the scores and half of the dims for the output
// (consumer.cuh). combine_mla adds up what several blocks have of one row tile.
// Must hold: sm_90a, launched with threads() threads and shared_bytes() bytes.
#pragma once

#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/mla_sm90/consumer.cuh"
#include "kernels/mla_sm90/epilogue.cuh"
#include "kernels/mla_sm90/producer.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct MlaSm90 {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  using Cursor = KeyCursor<kSchedule>;
  using Tile = RowTile<kSchedule>;
  using Counts = KeyCounts<kSchedule, MlaSm90Config::threads()>;

  const MlaSm90Arguments& arguments;
  const AttentionParams& p = arguments.attention;
  MlaStorage shared{ptx::dynamic_shared()};
  i32 row_tile = static_cast<i32>(ptx::block_index()) % arguments.row_tiles;
  i32 worker = static_cast<i32>(ptx::block_index()) / arguments.row_tiles;
  i32 workers = static_cast<i32>(ptx::num_blocks()) / arguments.row_tiles;
  QueryRows rows = query_rows_of<kConfig>(arguments, row_tile);
  Counts counts{p, rows, shared.words()};

  void run() {
    if (ptx::thread_index() == 0) {
      ptx::prefetch_tensormap(arguments.kv);
      shared.init();
    }
    ptx::block_sync();
    ptx::grid_dependents_launch();
    const KeyShares shares(counts.of_head() * static_cast<i32>(p.heads_kv), workers);
    if (worker < shares.num_workers && shares.num_chunks > 0) attend(shares);
    if (counts.has_empty()) clear_sequences();
    if (p.packed.q && row_tile == 0 && worker == 0) clear_rest();
  }

 private:
  void attend(const KeyShares& shares) {
    const i32 of_head = counts.of_head();
    const i32 begin = shares.begin(worker), end = shares.begin(worker + 1);
    Cursor cursor{&p, rows, {}, begin / of_head, 0, 0, {}, {}};
    const i32 tile_begin = begin - begin % of_head + counts.seek(cursor, begin % of_head);
    const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
    if (warpgroup == 2) {
      ptx::setmaxnreg_dec<MlaSm90Config::producer_registers()>();
      if (ptx::broadcast(ptx::thread_index() / 32 % 4) != 0) return;
      const i32 box_rows =
          kSchedule.paged ? key_box_rows(p, MlaSm90Config::kKeys) : MlaSm90Config::kKeys;
      MlaProducer<kConfig>{arguments, shared, box_rows}.run(cursor, end - begin);
      return;
    }
    ptx::setmaxnreg_inc<MlaSm90Config::consumer_registers()>();
    consume(shares, cursor, tile_begin, warpgroup);
  }

  void consume(const KeyShares& shares, Cursor& cursor, i32 tile_begin, i32 warpgroup) {
    const i32 end = shares.begin(worker + 1);
    MlaConsumer<kConfig> consumer{p, shared, warpgroup, ptx::thread_index() % 128,
                                  arguments.unit.log2s};
    u32 count = 0;
#pragma unroll 1
    for (i32 block = shares.begin(worker);; ++count) {
      const Tile tile(p, arguments.unit, arguments.group, row_tile * MlaSm90Config::kRows,
                      cursor.kv_head, cursor.index, cursor.sequence);
      consumer.start(tile);
      const i32 num_blocks = min(cursor.blocks.count - cursor.block, end - block);
      i32 first = cursor.first_key(warpgroup);
      if (warpgroup == 0) {
        consumer.begin(first);
        first += kSchedule.block_keys();
      }
#pragma unroll 1
      for (i32 n = warpgroup == 0; n < num_blocks; ++n, first += kSchedule.block_keys()) {
        consumer.step(first);
      }
      if (warpgroup == 0) consumer.end();
      leave(consumer, tile, count, shares.owner(tile_begin),
            shares.owner(tile_begin + cursor.blocks.num_chunks() - 1));
      block += num_blocks;
      if (block == end) break;
      tile_begin += cursor.blocks.num_chunks();
      cursor.next_tile();
    }
  }

  // Row tile number `count` of this block, whose keys workers from `first_owner` on have.
  void leave(MlaConsumer<kConfig>& consumer, const Tile& tile, u32 count, i32 first_owner,
             i32 last_owner) const {
    const i32 half = consumer.half;
    const i32 row[2] = {consumer.row_of(0), consumer.row_of(1)};
    MlaRow found[2];
    const bool is_bad = ptx::load_shared(shared.bad(count)) != 0;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float sum = consumer.sum[h];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      consumer.sum[h] = sum;
      if (lane_index() % 4 == 0) {
        ptx::store_shared(shared.sum(half, row[h]), __builtin_bit_cast(u32, sum));
      }
    }
    MlaConsumer<kConfig>::sync_both();
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const u32 other = ptx::load_shared(shared.sum(1 - half, row[h]));
      const float sum = consumer.sum[h] + __builtin_bit_cast(float, other);
      found[h] = {consumer.maximum[h], is_bad ? -1.f : sum};
    }
    if (first_owner == last_owner) {
      const MlaStore<kConfig> store(tile, row, found);
      if (half == 0) store.store_statistics();
      u32 bad = 0;
#pragma unroll
      for (i32 n = 0; n < MlaSm90Config::kHalfDims / 16; ++n) {
        const float* const o = consumer.O + 8 * n;
        bad |= store.store({o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]},
                           half * MlaSm90Config::kHalfDims + 16 * n);
      }
      store.recompute_bad(bad, half * MlaSm90Config::kHalfDims, MlaSm90Config::kHalfDims);
      return;
    }
    float* const part = MlaParts<kConfig>{arguments, row_tile}.part(worker, worker == first_owner);
#pragma unroll
    for (i32 n = 0; n < MlaSm90Config::kHalfDims / 8; ++n) {
      const float* const o = consumer.O + 4 * n;
      ptx::store_l2_x4(part + MlaParts<kConfig>::quad(half, n, consumer.thread),
                       {{o[0], o[1], o[2], o[3]}});
    }
    if (half != 0 || lane_index() % 4 != 0) return;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float* const state = part + MlaParts<kConfig>::state(row[h]);
      state[0] = found[h].maximum;
      state[1] = found[h].sum;
    }
  }

  // Rows of sequences that see no key: o = 0, lse = -inf.
  void clear_sequences() const {
    constexpr i32 kWarps = MlaSm90Config::threads() / 32;
    for (i64 at = worker * kWarps + static_cast<i32>(warp_index()); at < p.num_sequences;
         at += workers * kWarps) {
      const i32 index = static_cast<i32>(at);
      if (counts.count_of(index) != 0) continue;
      const DecodeSequence sequence = decode_sequence<kSchedule>(p, index);
      for (i32 kv_head = 0; kv_head < p.heads_kv; ++kv_head) {
        clear({p, arguments.unit, arguments.group, row_tile * MlaSm90Config::kRows, kv_head, index,
               sequence});
      }
    }
  }

  // Rows of a packed q past the last offset.
  void clear_rest() const {
    if (warp_index() != 0) return;
    const i64 last = load_index(p.cu_q, p.num_sequences * p.cu_q.strides[3]);
    DecodeSequence rest{};
    rest.q_begin = static_cast<i32>(clamp<i64>(last, 0, p.q_rows));
    rest.shape.q_len = static_cast<i32>(p.q_rows) - rest.q_begin;
    const i32 num_rows = rest.shape.q_len * arguments.group;
    for (i32 kv_head = 0; kv_head < p.heads_kv; ++kv_head) {
      for (i32 first = 0; first < num_rows; first += MlaSm90Config::kRows) {
        clear({p, arguments.unit, arguments.group, first, kv_head, 0, rest});
      }
    }
  }

  // All lanes of a warp.
  static void clear(const Tile& tile) {
    constexpr i32 kQuads = kSchedule.d_v / 4;
    const StoreRowTile<kSchedule> result{tile};
    for (i32 n = static_cast<i32>(lane_index()); n < tile.num_rows() * kQuads; n += 32) {
      result.clear(n / kQuads, n % kQuads);
    }
  }
};

template <MlaSm90Config kConfig>
void mla_sm90(const MlaSm90Arguments& arguments) {
  MlaSm90<kConfig>{arguments}.run();
}

}  // namespace fulmen
