// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The warps of mla_few_rows that bring records: of every second block eight warps, eight keys each.
// A warp asks for its keys of the next such block as soon as it has stored those of this one, and
// keeps them in registers until their buffer was read; then their numbers become float16 on their
// way to shared memory.
#pragma once

#include "kernels/attention/mla_record.cuh"
#include "kernels/mla_sm90/few_rows_config.h"
#include "kernels/mla_sm90/gather.cuh"
#include "kernels/mla_sm90/record_numbers.cuh"

namespace fulmen {

template <MlaFewRowsConfig kConfig>
struct MlaFewRowsRecords {
  using Config = MlaFewRowsConfig;
  using Finder = MlaKeyFinder<kConfig.common, Config::kWarpKeys>;
  using Cursor = KeyCursor<kConfig.common.schedule>;
  static constexpr RecordLayout kLayout = kConfig.common.record == 584 ? kRecord584 : kRecord656;
  static constexpr bool kHasPageScales = kLayout.has_page_scales();
  static constexpr i32 kStored = i32(kLayout.stored());
  static constexpr i32 kRotaryAt = kHasPageScales ? kStored : kStored + 16;
  static constexpr i32 kTurns = Config::kWarpKeys / 4;  // of eight lanes a key

  const MlaSm90Arguments& arguments;
  MlaFewRowsStorage<kConfig> shared;
  i32 buffer;
  i32 warp;             // of those of the buffer
  bool is_bad = false;  // some key has no page, or numbers that were rounded

  MlaKeyAt entry{};  // of the block that is asked for next
  // Of the one that was asked for: 16 numbers of every key and their scale, 8 of the last ones of
  // every fourth key.
  ptx::U32x4 numbers[Config::kWarpKeys];
  u32 scales[Config::kWarpKeys];
  ptx::U32x4 rotary[kTurns];
  u32 missing = 0;

  static i32 lane() { return static_cast<i32>(lane_index()); }
  static bool has_numbers() { return lane() * 16 < kStored; }

  // All blocks of the buffer, from the cursor's on.
  void run(KeyCursor<kConfig.common.schedule>& cursor, i32 rank) {
    bool is_used = false;
    look_up(cursor, rank);
#pragma unroll 1
    for (bool is_asked = false;;) {
      if (is_asked) {
        if (is_used) ptx::bar_sync(shared.empty(buffer), shared.kTogether);
        store();
        ptx::bar_arrive(shared.full(buffer), shared.kTogether);
        is_used = true;
      }
      if (cursor.block >= cursor.blocks.count) break;
      fetch(cursor.kv_head);
      is_asked = true;
      cursor.block += Config::kBuffers;
      look_up(cursor, rank);
    }
    if (lane() == 0) ptx::store_shared(shared.bad(buffer * Config::kWarps + warp), is_bad);
  }

 private:
  // Of the cursor's block.
  void look_up(const Cursor& cursor, i32 rank) {
    const i32 first = cursor.first_key(rank) + warp * Config::kWarpKeys;
    entry = Finder{arguments}.look_up(cursor, first + lane());
  }

  void fetch(i32 kv_head) {
    const AttentionParams& p = arguments.attention;
    const MlaFound found = Finder{arguments}.find(entry, kv_head);
    i64 rows = p.kv_rows;
    if constexpr (kConfig.common.schedule.paged) {
      rows = max<i64>(p.cache_layout.slot_rows, p.cache_layout.page_rows);
    }
    const RecordRow<const u8> record(kLayout.dims, found.page, found.row, rows, p.k.strides[2]);
    const u64 stored = found.is_there ? reinterpret_cast<u64>(record.stored) : 0;
    const u64 scales_at = found.is_there ? reinterpret_cast<u64>(record.scales) : 0;
    missing = found.word;
#pragma unroll
    for (i32 i = 0; i < Config::kWarpKeys; ++i) {
      const u64 from = of_lane(stored, i);
      const u64 own_scales = kHasPageScales ? of_lane(scales_at, i) : from + kStored;
      const bool is_any = from != 0 && has_numbers();
      numbers[i] = is_any ? load_vector(from + u64(lane() * 16)) : ptx::U32x4{{0, 0, 0, 0}};
      scales[i] = is_any ? load_scale(own_scales, lane() * 16 / i32(kLayout.group)) : 0;
    }
#pragma unroll
    for (i32 n = 0; n < kTurns; ++n) {
      const u64 from = of_lane(stored, lane() / 8 + 4 * n);
      rotary[n] = from != 0 ? load_vector(from + u64(kRotaryAt + lane() % 8 * 16))
                            : ptx::U32x4{{0, 0, 0, 0}};
    }
  }

  // What was asked for goes to shared memory.
  void store() {
    bool is_rounded = false;
#pragma unroll
    for (i32 i = 0; i < Config::kWarpKeys; ++i) {
      const float scale = kHasPageScales ? power_of(static_cast<u8>(scales[i]))
                                         : __builtin_bit_cast(float, scales[i]);
      const bool is_there = (missing >> i & 1) == 0 && has_numbers();
      is_rounded |= is_there && !is_exact_scale(__builtin_bit_cast(u32, scale));
      const u32 twice = ptx::pack<DType::kFloat16>(scale, scale);
      const ptx::U32x4& x = numbers[i];
      if (!has_numbers()) continue;
      const u32 to =
          shared.key(buffer, warp * Config::kWarpKeys + i) + static_cast<u32>(lane()) * 16;
      ptx::store_shared_x4(to, widened_record(x.word[0], x.word[1], twice));
      ptx::store_shared_x4(to + 32 * 16, widened_record(x.word[2], x.word[3], twice));
    }
#pragma unroll
    for (i32 n = 0; n < kTurns; ++n) {
      ptx::U32x4 x = rotary[n];
      if constexpr (kHasPageScales) is_rounded |= narrow_positions(x);
      const u32 unit = static_cast<u32>(Config::unit_of(kStored / 8 + lane() % 8));
      ptx::store_shared_x4(
          shared.key(buffer, warp * Config::kWarpKeys + lane() / 8 + 4 * n) + unit * 16, x);
    }
    is_bad |= ptx::any(is_rounded) || missing >> 31 != 0;
    if (lane() == 0) ptx::store_shared(shared.missing(buffer, warp), missing);
  }

  static ptx::U32x4 load_vector(u64 from) {
    return ptx::load_global_x4(reinterpret_cast<const u16*>(from));
  }
  static u32 load_scale(u64 from, i32 group) {
    if constexpr (kHasPageScales)
      return ptx::load_constant(reinterpret_cast<const u8*>(from) + group);
    return __builtin_bit_cast(u32,
                              ptx::load_constant(reinterpret_cast<const float*>(from) + group));
  }
};

}  // namespace fulmen
