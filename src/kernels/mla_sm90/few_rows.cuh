// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Latent attention of few query rows over records, on Hopper: a cluster has a row tile of 16 rows
// whole, its blocks 64 keys each of every round. Two groups of warps bring keys, each to a buffer
// of its own; eight warps multiply by mma.sync: scores of 32 keys over a quarter of the dims, two
// rows of P and 64 dims of O each. At the end every block adds up some of the dims, out of the
// shared memory of all. Must hold: sm_90, launched with threads() threads and shared_bytes() bytes,
// a cluster for every row tile.
#pragma once

#include "kernels/decode_sm80/empty_rows.cuh"
#include "kernels/mla_sm90/few_rows_products.cuh"
#include "kernels/mla_sm90/few_rows_records.cuh"

namespace fulmen {

template <MlaFewRowsConfig kConfig>
struct MlaFewRows {
  static constexpr DecodeSm80Config kSchedule = kConfig.common.schedule;
  using Config = MlaFewRowsConfig;
  using Tile = RowTile<kSchedule>;

  const MlaSm90Arguments& arguments;
  const AttentionParams& p = arguments.attention;
  MlaFewRowsStorage<kConfig> shared{ptx::dynamic_shared()};
  i32 warp = ptx::broadcast(static_cast<i32>(warp_index()));
  i32 lane = static_cast<i32>(lane_index());
  i32 rank = cluster_rank<kSchedule>();

  void run() {
    const i32 cluster = static_cast<i32>(ptx::block_index()) / kSchedule.cluster;
    const i32 number = quotient(cluster, arguments.row_tiles);
    const i32 row_tile = cluster - number * arguments.row_tiles;
    const i32 first = row_tile * Config::kRows;
    const QueryRows rows =
        kSchedule.one_query
            ? QueryRows{0, 0}
            : QueryRows{first / arguments.group, (first + Config::kRows - 1) / arguments.group};
    const i32 heads = static_cast<i32>(p.heads_kv), index = quotient(number, heads);
    KeyCursor<kSchedule> cursor{&p, rows, {}, number - index * heads, index, 0, {}, {}};
    cursor.sequence = decode_sequence<kSchedule>(p, cursor.index);
    cursor.blocks = chunked_blocks<kSchedule>(p, cursor.sequence, rows);
    if (rank == 0 && ptx::thread_index() == 0) report(p.faults, cursor.sequence.faults);
    const Tile tile(p, arguments.unit, arguments.group, first, cursor.kv_head, cursor.index,
                    cursor.sequence);
    if (cursor.blocks.count > 0) {
      attend(cursor, tile);
    } else if (rank == 0 && warp == 0) {
      EmptyRows<kSchedule>{p, arguments.unit, arguments.group, row_tile}.clear(
          row_tile, cursor.kv_head, cursor.index, cursor.sequence);
    }
  }

 private:
  // Where the divisor is 1 nearly always.
  static i32 quotient(i32 x, i32 divisor) { return divisor == 1 ? x : x / divisor; }

  void attend(KeyCursor<kSchedule>& cursor, const Tile& tile) const {
    if (warp < Config::kWarps) {
      MlaFewRowsProducts<kConfig>{arguments, shared, warp, lane}.run(tile, cursor.blocks.count);
    } else {
      const i32 number = warp - Config::kWarps;
      cursor.block = number / Config::kWarps;
      MlaFewRowsRecords<kConfig>{arguments, shared, cursor.block, number % Config::kWarps}.run(
          cursor, rank);
    }
    ptx::block_sync();  // warps -> what they have, and found wrong
    const bool is_bad =
        ptx::any(ptx::load_shared(shared.bad(lane % (Config::kBuffers * Config::kWarps))) != 0);
    if (is_bad && warp == 0 && lane < Config::kRows) {
      ptx::store_shared(shared.state(lane) + 4, __builtin_bit_cast(u32, -1.f));
    }
    if constexpr (kSchedule.cluster == 1) {
      ptx::block_sync();  // one warp -> states
      add_up(tile);
    } else {
      ptx::cluster_sync();  // blocks -> what they have
      add_up(tile);
      ptx::cluster_sync();  // all was read
    }
  }

  // Of 32 dims, four rows a time, eight lanes a row.
  void add_up(const Tile& tile) const {
    constexpr i32 kOwn = 512 / 32 / kSchedule.cluster, kTurns = Config::kRows / 4;
    constexpr float kUnit = 1.f / (1 << kSchedule.weight_log2());
    const StoreRowTile<kSchedule> result{tile};
#pragma unroll 1
    for (i32 task = warp; task < kOwn * kTurns; task += Config::num_warps()) {
      const i32 row = task % kTurns * 4 + lane / 8;
      const i32 quad = (rank * kOwn + task / kTurns) * 8 + lane % 8;
      DecodePartial total = sum_of_blocks(row, quad);
      if (!(total.sum < 0)) total.sum *= kUnit;
#pragma unroll
      for (float& x : total.o) x *= kUnit;
      result.store(row, quad, total);
    }
  }
  // Of a row, over the keys of all blocks.
  DecodePartial sum_of_blocks(i32 row, i32 quad) const {
    constexpr i32 kBlocks = kSchedule.cluster, kMostAtOnce = 8;
    DecodePartial parts[kBlocks];
#pragma unroll
    for (i32 block = 0; block < kBlocks; ++block) {
      load_state(parts[block], block, row);
      if constexpr (kBlocks <= kMostAtOnce) load_o(parts[block].o, block, row, quad);
    }
    DecodePartial total = sum_of(parts, arguments.unit.log2s);
    if constexpr (kBlocks > kMostAtOnce) {  // registers hold so many maxima, and not their O
      const float top = total.maximum == -kInfinity<float> ? 0.f : total.maximum;
#pragma unroll
      for (i32 block = 0; block < kBlocks; ++block) {
        const float weight = ptx::exp2((parts[block].maximum - top) * arguments.unit.log2s);
        float o[4];
        load_o(o, block, row, quad);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) total.o[i] += weight * o[i];
      }
    }
    return total;
  }
  void load_state(DecodePartial& part, i32 block, i32 row) const {
    const u32 at = of_block(shared.state(row), block);
    const auto load = [](u32 from) {
      const u32 x = kSchedule.cluster == 1 ? ptx::load_shared(from) : ptx::load_cluster(from);
      return __builtin_bit_cast(float, x);
    };
    part.maximum = load(at);
    part.sum = load(at + 4);
  }
  void load_o(float (&o)[4], i32 block, i32 row, i32 quad) const {
    const i32 dim = Config::unit_of(quad / 2) * 8 + quad % 2 * 4;
    const u32 at = of_block(shared.sum(row, dim), block);
    const ptx::U32x4 x =
        kSchedule.cluster == 1 ? ptx::load_shared_x4(at) : ptx::load_cluster_x4(at);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) o[i] = __builtin_bit_cast(float, x.word[i]);
  }
  static u32 of_block(u32 at, i32 block) {
    return kSchedule.cluster == 1 ? at : ptx::map_shared(at, static_cast<u32>(block));
  }
};

template <MlaFewRowsConfig kConfig>
void mla_few_rows(const MlaSm90Arguments& arguments) {
  MlaFewRows<kConfig>{arguments}.run();
}

}  // namespace fulmen
