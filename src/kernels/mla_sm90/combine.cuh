// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Adds up the parts of a row tile that several workers of mla_sm90 have, in the order of their
// keys. A block has some of the dims of one such tile, and eight groups of 128 threads, each as a
// warpgroup of mla_sm90 has the tile. Where parts are few, groups have dims of their own; else each
// takes every eighth part, and they meet in shared memory.
#pragma once

#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/mla_sm90/epilogue.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct CombineMla {
  using Config = MlaSm90Config;
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  static constexpr i32 kEights = kSchedule.d_v / 8;  // of 8 dims
  static constexpr i32 kGroups = Config::combine_threads() / 128;
  static constexpr i32 kLanes = Config::combine_threads() / Config::kRows;  // of a row
  // Units of dims whose sums meet in shared memory together.
  static constexpr i32 kTogether = kConfig.combine_eights();
  // That a group takes alone, at least: two, or as many as are computed again.
  static constexpr i32 kLeast =
      kSchedule.may_recompute() ? StoreRowTile<kSchedule>::kChunkDims / 8 : 2;

  const MlaSm90Arguments& arguments;
  const AttentionParams& p = arguments.attention;
  u32 shared = ptx::dynamic_shared();
  i32 slice = static_cast<i32>(ptx::block_index()) % arguments.slices;
  i32 row_tile = static_cast<i32>(ptx::block_index()) / arguments.slices % arguments.row_tiles;
  i32 number = static_cast<i32>(ptx::block_index()) / arguments.slices / arguments.row_tiles;
  QueryRows rows = query_rows_of<kConfig>(arguments, row_tile);
  MlaParts<kConfig> parts{arguments, row_tile};
  float log2s = arguments.unit.log2s;

  void run() {
    Counts counts(p, rows, shared);
    const Shares shares = mla_shares_of<kConfig>(counts, p, arguments.workers);
    if (shares.num_chunks == 0) return;
    KeyCursor<kSchedule> cursor{&p, rows, {}, 0, 0, 0, {}, {}};
    const i32 tile_begin = arguments.by_sequence ? find_sequence(counts, cursor)
                                                 : find_tile_of_worker(counts, shares, cursor);
    if (tile_begin < 0 || cursor.blocks.count == 0) return;
    const i32 first = shares.owner(tile_begin);
    const i32 last = shares.owner(tile_begin + cursor.blocks.num_chunks() - 1);
    if (first == last || (!arguments.by_sequence && first != number)) return;
    ptx::grid_dependency_wait();
    add_parts(cursor, first, last);
  }

 private:
  using Counts = KeyCounts<kSchedule, Config::combine_threads()>;
  using Shares = MlaShares<kConfig.several>;

  // The row tile of sequence and head `number`: its first chunk.
  i32 find_sequence(Counts& counts, KeyCursor<kSchedule>& cursor) const {
    const i32 sequences = static_cast<i32>(p.num_sequences);
    cursor.kv_head = number / sequences;
    cursor.index = number % sequences;
    cursor.enter();
    return cursor.kv_head * counts.of_head() + counts.begin_of(cursor.index);
  }
  // The row tile that worker `number` has the last key of, or -1.
  i32 find_tile_of_worker(Counts& counts, const Shares& shares,
                          KeyCursor<kSchedule>& cursor) const {
    if (number >= shares.num_workers()) return -1;
    const i32 last = shares.begin(number + 1) - 1;
    const i32 in_head = last % counts.of_head();
    cursor.kv_head = last / counts.of_head();
    return last - in_head + counts.seek(cursor, in_head);
  }

  static i32 group() { return static_cast<i32>(ptx::thread_index()) / 128; }
  static u32 thread() { return ptx::thread_index() % 128; }

  void add_parts(const KeyCursor<kSchedule>& cursor, i32 first, i32 last) const {
    const RowTile<kSchedule> tile(p, arguments.unit, arguments.group, row_tile * Config::kRows,
                                  cursor.kv_head, cursor.index, cursor.sequence);
    sum_rows(tile, first, last);
    const i32 num_parts = last - first + 1;
    const i32 first_row = static_cast<i32>(thread() / 32 * 16 + thread() % 32 / 4);
    const i32 row[2] = {first_row, first_row + 8};
    float top[2];
    MlaRowEnd ends[2];
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const ptx::U32x4 x = ptx::load_shared_x4(total_at(row[h]));
      top[h] = __builtin_bit_cast(float, x.word[0]);
      ends[h] = {__builtin_bit_cast(float, x.word[1]), __builtin_bit_cast(float, x.word[2])};
    }
    const MlaStore<kConfig> store(tile, row, ends);
    if (!MlaParts<kConfig>::has_rows(tile, first_row)) last = first - 1;
    u32 bad = 0;
    i32 count = kEights / arguments.slices, unit = slice * count;  // of the block, or of a group
    if (num_parts <= kGroups && count % (kLeast * kGroups) == 0) {
      count /= kGroups;
      unit += group() * count;
#pragma unroll 1
      for (i32 n = unit; n < unit + count; n += 2) {
        float O[2][4];
        sum_of_dims<2, 1>(O, n, row, top, first, last);
        bad |= store.store(O[0], 8 * n) | store.store(O[1], 8 * n + 8);
      }
    } else {
#pragma unroll 1
      for (i32 n = unit; n < unit + count; n += kTogether) {
        float O[kTogether][4];
        sum_of_dims<kTogether, kGroups>(O, n, row, top, first, last);
        if (!of_groups(O)) continue;
#pragma unroll
        for (i32 i = 0; i < kTogether; ++i) bad |= store.store(O[i], 8 * (n + i));
      }
      if (group() != 0) return;
    }
    store.recompute_bad(bad, 8 * unit, 8 * count);
  }

  float weight_of(float maximum, float top) const {
    return ptx::exp2((maximum - (top == -kInfinity<float> ? 0.f : top)) * log2s);
  }

  // Of all rows, a row by kLanes neighbouring threads: maxima and ends go to shared memory.
  void sum_rows(const RowTile<kSchedule>& tile, i32 first, i32 last) const {
    const i32 row = static_cast<i32>(ptx::thread_index()) / kLanes;
    const i32 lane = static_cast<i32>(ptx::thread_index()) % kLanes;
    MlaRow total{-kInfinity<float>, 0};
    bool is_bad = false;
    constexpr i32 kParts = 5;  // at once
#pragma unroll 1
    for (i32 from = first + lane; from <= last; from += kParts * kLanes) {
      ptx::F32x2 found[kParts];
#pragma unroll
      for (i32 i = 0; i < kParts; ++i) {
        const i32 at = min(from + i * kLanes, last);
        found[i] = ptx::load_l2_x2(parts.part(at, at == first) + parts.state(row));
      }
#pragma unroll
      for (i32 i = 0; i < kParts; ++i) {
        if (from + i * kLanes > last) continue;
        is_bad |= found[i].word[1] < 0;
        total = merged(total, {found[i].word[0], found[i].word[1]});
      }
    }
#pragma unroll
    for (u32 step = 1; step < kLanes; step *= 2) {
      total =
          merged(total, {ptx::shuffle_xor(total.maximum, step), ptx::shuffle_xor(total.sum, step)});
      is_bad |= ptx::shuffle_xor(static_cast<u32>(is_bad), step) != 0;
    }
    if (lane == 0) {
      const MlaRow found{total.maximum, is_bad ? -1.f : total.sum};
      const MlaRowEnd end = end_row<kConfig>(tile, row, found, slice == 0);
      ptx::store_shared_x4(total_at(row), {{__builtin_bit_cast(u32, total.maximum),
                                            __builtin_bit_cast(u32, end.factor),
                                            __builtin_bit_cast(u32, end.sum), 0}});
    }
    ptx::block_sync();  // rows -> their sums
  }
  MlaRow merged(const MlaRow& a, const MlaRow& b) const {
    const float top = ptx::max(a.maximum, b.maximum);
    return {top, a.sum * weight_of(a.maximum, top) + b.sum * weight_of(b.maximum, top)};
  }
  u32 total_at(i32 row) const { return shared + Config::combine_totals_at() + row * 16; }

  // Units of dims from `unit` on, of a thread's two rows, over the parts that it has: every
  // kStep-th, from that of its group on.
  template <i32 kCount, i32 kStep>
  void sum_of_dims(float (&O)[kCount][4], i32 unit, const i32 (&row)[2], const float (&top)[2],
                   i32 first, i32 last) const {
#pragma unroll
    for (i32 i = 0; i < kCount * 4; ++i) O[i / 4][i % 4] = 0;
    const i64 at = MlaParts<kConfig>::quad(unit, thread());
    constexpr i32 kParts = kCount == 1 ? 5 : kCount == 2 ? 2 : 1;  // at once
    i32 from = first + (kStep == 1 ? 0 : group());
#pragma unroll 1
    for (; from + (kParts - 1) * kStep <= last; from += kParts * kStep) {
      add<kCount, kParts, kStep>(O, at, row, top, from, first);
    }
#pragma unroll 1
    for (; from <= last; from += kStep) add<kCount, 1, kStep>(O, at, row, top, from, first);
  }

  // So many of these parts from `begin` on, all read before the first is added.
  template <i32 kCount, i32 kParts, i32 kStep>
  void add(float (&O)[kCount][4], i64 at, const i32 (&row)[2], const float (&top)[2], i32 begin,
           i32 first) const {
    ptx::F32x4 o[kParts][kCount];
    float maxima[kParts][2];
#pragma unroll
    for (i32 i = 0; i < kParts; ++i) {
      const i32 number_of = begin + i * kStep;
      const float* const from = parts.part(number_of, number_of == first);
#pragma unroll
      for (i32 n = 0; n < kCount; ++n) o[i][n] = ptx::load_l2_x4(from + at + n * 512);
#pragma unroll
      for (i32 h = 0; h < 2; ++h) maxima[i][h] = ptx::load_l2(from + parts.state(row[h]));
    }
#pragma unroll
    for (i32 i = 0; i < kParts; ++i) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float weight = weight_of(maxima[i][h], top[h]);
#pragma unroll
        for (i32 n = 0; n < kCount; ++n) {
          O[n][2 * h] += weight * o[i][n].word[2 * h];
          O[n][2 * h + 1] += weight * o[i][n].word[2 * h + 1];
        }
      }
    }
  }

  // Adds the sums of all groups; in group 0, the others return false.
  bool of_groups(float (&O)[kTogether][4]) const {
    const auto at = [&](i32 of_group, i32 unit) {
      return shared + Config::combine_sums_at() +
             (((of_group - 1) * kTogether + unit) * 128 + static_cast<i32>(thread())) * 16;
    };
#pragma unroll
    for (i32 n = 0; n < kTogether; ++n) {
      if (group() == 0) break;
      ptx::U32x4 x;
#pragma unroll
      for (i32 i = 0; i < 4; ++i) x.word[i] = __builtin_bit_cast(u32, O[n][i]);
      ptx::store_shared_x4(at(group(), n), x);
    }
    ptx::block_sync();  // groups -> their sums
#pragma unroll
    for (i32 n = 0; n < kTogether; ++n) {
      if (group() != 0) break;
#pragma unroll
      for (i32 other = 1; other < kGroups; ++other) {
        const ptx::U32x4 x = ptx::load_shared_x4(at(other, n));
#pragma unroll
        for (i32 i = 0; i < 4; ++i) O[n][i] += __builtin_bit_cast(float, x.word[i]);
      }
    }
    ptx::block_sync();  // they were read
    return group() == 0;
  }
};

template <MlaSm90Config kConfig>
void combine_mla(const MlaSm90Arguments& arguments) {
  CombineMla<kConfig>{arguments}.run();
}

}  // namespace fulmen
