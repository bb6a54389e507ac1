// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What becomes of a row tile: its result, where one block had all its keys; else a part of it,
// which goes to the workspace as the registers have it, and combine_mla adds the parts in the order
// of their keys. A hidden key has weight 0, and 0 times NaN is NaN: rows that come out so are
// computed again, as results of decode_sm80 are.
#pragma once

#include "kernels/decode_sm80/result.cuh"
#include "kernels/mla_sm90/config.h"

namespace fulmen {

// The query rows of a row tile.
template <MlaSm90Config kConfig>
QueryRows query_rows_of(const MlaSm90Arguments& arguments, i32 row_tile) {
  constexpr i32 kRows = MlaSm90Config::kRows;
  return {row_tile * kRows / arguments.group, (row_tile * kRows + kRows - 1) / arguments.group};
}

// Maximum of a row's scores, and the sum of their exponentials; negative: some of its keys have no
// page.
struct MlaRow {
  float maximum;
  float sum;
};

// Dims of O as a thread of a warpgroup has them: of two rows, h, two neighbours of every eight.
template <MlaSm90Config kConfig>
struct MlaStore {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  using State = SoftmaxState<AccurateMath<float>>;

  StoreRowTile<kSchedule> result;
  i32 rows[2];
  State states[2];
  float factors[2];
  i64 o_at[2];  // of the row's first dim
  bool counts[2];

  MlaStore(const RowTile<kSchedule>& tile, const i32 (&rows_)[2], const MlaRow (&found)[2])
      : result{tile}, rows{rows_[0], rows_[1]} {
    const AttentionParams& p = tile.p;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const bool is_bad = found[h].sum < 0;
      counts[h] = tile.counts(rows[h]) && (kSchedule.may_recompute() || !is_bad);
      states[h] = counts[h] ? State{found[h].maximum * tile.unit.nats, found[h].sum} : State{};
      float sink = -kInfinity<float>;
      if (p.sinks.present() && rows[h] < tile.num_rows()) {
        sink = load_real_called<float>(p.sinks, p.sinks.offset(0, tile.head_of(rows[h]), 0, 0));
      }
      o_at[h] = tile.offset(p.o, rows[h], 0);
      factors[h] = counts[h] ? states[h].normalizer(sink) : 0.f;
    }
  }

  void store_statistics() const {
    if (lane_index() % 4 != 0) return;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (rows[h] < result.tile.num_rows()) result.store_statistics(rows[h], states[h]);
    }
  }

  // Sixteen dims from `first` on, of both rows: O as float32 sums, four of the first eight dims,
  // then four of the others. Returns whether some that count are NaN or infinite, bit h.
  u32 store(const float (&O)[8], i32 first) const {
    const bool is_odd_lane = lane_index() % 2 != 0;
    const i32 dim = first + (is_odd_lane ? 8 : 0) + static_cast<i32>(lane_index() % 4 / 2) * 4;
    u32 bad = 0;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      // Neighbouring lanes exchange a pair, so that each has four neighbouring dims.
      const float x0 = O[2 * h], y0 = O[2 * h + 1], x1 = O[4 + 2 * h], y1 = O[5 + 2 * h];
      const float x = ptx::shuffle_xor(is_odd_lane ? x0 : x1, 1);
      const float y = ptx::shuffle_xor(is_odd_lane ? y0 : y1, 1);
      float o[4] = {is_odd_lane ? x : x0, is_odd_lane ? y : y0, is_odd_lane ? x1 : x,
                    is_odd_lane ? y1 : y};
      const float all = o[0] + o[1] + o[2] + o[3];
      if (counts[h] && all - all != 0) bad |= 1u << h;
      if (rows[h] >= result.tile.num_rows()) continue;
#pragma unroll
      for (float& each : o) each = counts[h] ? each * factors[h] : 0.f;
      result.store_o(o_at[h] + dim, o);
    }
    return bad;
  }

  // All lanes of a warp together, which have stored dims [first, first + dims) of their rows: rows
  // whose bit is set in `bad`, and whose sum is finite, are computed again.
  void recompute_bad(u32 bad, i32 first, i32 dims) const {
    if constexpr (!kSchedule.may_recompute()) return;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float sum = states[h].row_sum;
      const bool is_bad = counts[h] && sum - sum == 0 && ((bad >> h & 1) != 0 || sum < 0);
      const u32 lanes = ptx::ballot(is_bad);
      if (lanes == 0) continue;
      ptx::warp_sync();  // lanes -> what is overwritten below
      if ((lanes >> (lane_index() & 28) & 0xf) == 0) continue;
      constexpr i32 kChunk = StoreRowTile<kSchedule>::kChunkDims;
      const i32 chunks = dims / kChunk;
      for (i32 n = static_cast<i32>(lane_index() % 4); n < chunks; n += 4) {
        result.recompute_chunk(rows[h], first / kChunk + n);
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
  // Four numbers of a thread of a warpgroup: of eight dims, number `n` of the warpgroup's.
  static i64 quad(i32 half, i32 n, u32 thread) {
    return ((half * (MlaSm90Config::kHalfDims / 8) + n) * 128 + static_cast<i32>(thread)) * 4;
  }
  static i64 state(i32 row) { return MlaSm90Config::states_at() + 2 * row; }
};

}  // namespace fulmen
