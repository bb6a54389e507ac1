// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What becomes of a row tile: its result, where one block had all its keys; else a part of it,
// which goes to the workspace as the registers have it, and combine_mla adds the parts in the order
// of their keys. A hidden key has weight 0, and 0 times NaN is NaN: rows that come out so are
// computed again, as results of decode_sm80 are.
#pragma once

#include "kernels/decode_sm80/result.cuh"
#include "kernels/mla_sm90/storage.cuh"

namespace fulmen {

// The query rows of a row tile.
template <MlaSm90Config kConfig>
QueryRows query_rows_of(const MlaSm90Arguments& arguments, i32 row_tile) {
  constexpr i32 kRows = MlaSm90Config::kRows;
  return {row_tile * kRows / arguments.group, (row_tile * kRows + kRows - 1) / arguments.group};
}

template <MlaSm90Config kConfig, class Counts>
MlaShares<kConfig.several> mla_shares_of(Counts& counts, const AttentionParams& p, i32 workers) {
  const i32 heads = static_cast<i32>(p.heads_kv);
  i32 even_tiles = 0;
  if constexpr (kConfig.several) {
    if (counts.is_even()) even_tiles = heads * static_cast<i32>(p.num_sequences);
  }
  return mla_shares<kConfig.several>(counts.of_head() * heads, workers, even_tiles);
}

template <MlaSm90Config kConfig>
RowTile<kConfig.schedule> tile_of(const MlaSm90Arguments& arguments, i32 row_tile,
                                  const MlaTask& task) {
  return {arguments.attention,
          arguments.unit,
          arguments.group,
          row_tile * MlaSm90Config::kRows,
          task.kv_head,
          task.index,
          {task.batch, task.q_begin, task.kv_begin, task.first_page, task.shape, 0}};
}

// Maximum of a row's scores, and the sum of their exponentials; negative: some of its keys have no
// page.
struct MlaRow {
  float maximum;
  float sum;
};

// What a row's sums of values are multiplied by in the end, 0: they count for nothing; and the sum
// of its weights, negative as above.
struct MlaRowEnd {
  float factor;
  float sum;
};

// Of a row all of whose keys are known; its statistics are stored where `stores`.
template <MlaSm90Config kConfig>
MlaRowEnd end_row(const RowTile<kConfig.schedule>& tile, i32 row, const MlaRow& found,
                  bool stores) {
  using State = SoftmaxState<AccurateMath<float>>;
  const bool counts = tile.counts(row) && (kConfig.schedule.may_recompute() || !(found.sum < 0));
  constexpr float kWeight = 1.f / (1 << kConfig.schedule.weight_log2());
  const State state = counts ? State{found.maximum * tile.unit.nats, found.sum * kWeight} : State{};
  float sink = -kInfinity<float>;
  if (tile.p.sinks.present() && row < tile.num_rows()) {
    sink = load_real_called<float>(tile.p.sinks, tile.p.sinks.offset(0, tile.head_of(row), 0, 0));
  }
  if (stores && row < tile.num_rows()) {
    StoreRowTile<kConfig.schedule>{tile}.store_statistics(row, state);
  }
  return {counts ? state.normalizer(sink) * kWeight : 0.f, counts ? found.sum : 0.f};
}

// Dims of O as a thread of a warpgroup has them: of two rows, h, two neighbours of every eight.
template <MlaSm90Config kConfig>
struct MlaStore {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;

  StoreRowTile<kSchedule> result;
  i32 rows[2];
  MlaRowEnd ends[2];
  i64 o_at[2];  // of the row's first dim

  MlaStore(const RowTile<kSchedule>& tile, const i32 (&rows_)[2], const MlaRowEnd (&ends_)[2])
      : result{tile}, rows{rows_[0], rows_[1]}, ends{ends_[0], ends_[1]} {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) o_at[h] = tile.offset(tile.p.o, rows[h], 0);
  }

  // Eight dims from `first` on, of both rows: float32 sums. Returns whether some that count are NaN
  // or infinite, bit h.
  u32 store(const float (&O)[4], i32 first) const {
    // Neighbouring lanes exchange a pair, so that each has four neighbouring dims of one row.
    const i32 h = static_cast<i32>(lane_index() % 2);
    const float x = ptx::shuffle_xor(h != 0 ? O[0] : O[2], 1);
    const float y = ptx::shuffle_xor(h != 0 ? O[1] : O[3], 1);
    float o[4] = {h != 0 ? x : O[0], h != 0 ? y : O[1], h != 0 ? O[2] : x, h != 0 ? O[3] : y};
    const float factor = h != 0 ? ends[1].factor : ends[0].factor;
    const float all = o[0] + o[1] + o[2] + o[3];
    const u32 bad = factor != 0 && all - all != 0 ? 1u << h : 0;
    if ((h != 0 ? rows[1] : rows[0]) >= result.tile.num_rows()) return bad;
#pragma unroll
    for (float& each : o) each = factor != 0 ? each * factor : 0.f;
    const i32 dim = first + static_cast<i32>(lane_index() % 4 / 2) * 4;
    result.store_o((h != 0 ? o_at[1] : o_at[0]) + dim, o);
    return bad;
  }

  // All lanes of a warp together, which have stored dims [first, first + dims) of their rows: rows
  // whose bit is set in `bad`, and whose sum is finite, are computed again.
  void recompute_bad(u32 bad, i32 first, i32 dims) const {
    if constexpr (!kSchedule.may_recompute()) return;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float sum = ends[h].sum;
      const bool is_bad = sum - sum == 0 && ((bad >> h & 1) != 0 || sum < 0);
      const u32 lanes = ptx::ballot(is_bad);
      if (lanes == 0) continue;
      ptx::warp_sync();  // lanes -> what is overwritten below
      if ((lanes >> (lane_index() & 28) & 0xf) == 0) continue;
      constexpr i32 kChunk = StoreRowTile<kSchedule>::kChunkDims;
      const i32 chunks = dims / kChunk;
#pragma unroll 1
      for (i32 n = static_cast<i32>(lane_index() % 4); n < chunks; n += 4) {
        const RowTile<kSchedule>& tile = result.tile;
        result.recompute(tile.p, tile.sequence.batch, tile.head_of(rows[h]),
                         i64{tile.sequence.q_begin} + tile.query_of(rows[h]), first / kChunk + n);
      }
    }
  }
};

// The workspace.
template <MlaSm90Config kConfig>
struct MlaParts {
  const MlaSm90Arguments& arguments;
  i32 row_tile;

  // A worker may leave the first part of one row tile and a later one of another.
  float* part(i32 worker, bool is_first) const {
    const i64 index = 2 * (i64{worker} * arguments.row_tiles + row_tile) + is_first;
    return arguments.parts + index * MlaSm90Config::part_floats();
  }
  // Four numbers of a thread of a warpgroup: of eight dims, number `n` of all.
  static i64 quad(i32 n, u32 thread) { return (n * 128 + static_cast<i32>(thread)) * 4; }
  static i64 state(i32 row) { return MlaSm90Config::states_at() + 2 * row; }
  // Whether any row counts of a warp that has this one: of others a part has maxima and sums alone.
  static bool has_rows(const RowTile<kConfig.schedule>& tile, i32 row) {
    return row / 16 * 16 < tile.num_rows();
  }
};

}  // namespace fulmen
