// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Keys of mla_sm90 that are records (attention/mla_record.cuh). Each of four warps fetches a
// quarter of every block as it is in memory, while it widens that of the block before: numbers
// times their scales, in float16, an instruction for two to convert and one to multiply; exact
// where scales are powers of two from 2^-15 to 2^7. Rows that see another are computed again.
// Scores have no sums of their own for every scale: the registers do not suffice.
#pragma once

#include "kernels/attention/mla_record.cuh"
#include "kernels/mla_sm90/gather.cuh"
#include "kernels/mla_sm90/record_numbers.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct MlaRecords {
  using Config = MlaSm90Config;
  using Stage = PipelineState<kConfig.stages()>;
  static constexpr RecordLayout kLayout = kConfig.record == 584 ? kRecord584 : kRecord656;
  static constexpr bool kHasPageScales = kLayout.has_page_scales();
  static constexpr i32 kVectors = i32(kLayout.bytes) / 16;  // whole ones of a row
  static constexpr i32 kHalfPieces = Config::kPieces / 2;

  MlaKeyFinder<kConfig> finder;
  MlaStorage<kConfig> shared;
  i32 warp;
  u32 buffer = 0;       // of the block that is asked for next
  Stage before{};       // where the block goes that was asked for last
  u32 missing = 0;      // of its keys
  ptx::U32x2 scales{};  // of this lane's key of it, where they lie behind the page
  bool is_asked = false;

  static i32 lane() { return static_cast<i32>(lane_index()); }
  MlaKeyAt look_up(const KeyCursor<kConfig.schedule>& cursor) const {
    return finder.look_up(cursor, cursor.first_key(0) + mla_key(warp, lane()));
  }

  void load(const MlaKeyAt& entry, i32 kv_head, const Stage& at) {
    const MlaFound found = finder.find(entry, kv_head);
    const ptx::U32x2 own_scales = fetch(found);
    if (is_asked) widen_block<1>();
    before = at;
    missing = found.word;
    scales = own_scales;
    is_asked = true;
    buffer ^= 1;
  }
  void finish() {
    buffer ^= 1;
    if (is_asked) widen_block<0>();
  }

 private:
  // Records of the warp's keys on their way to the buffer, 16 bytes a lane; returns scales of this
  // lane's that lie elsewhere.
  ptx::U32x2 fetch(const MlaFound& found) const {
    const AttentionParams& p = finder.arguments.attention;
    i64 rows = p.kv_rows;
    if constexpr (kConfig.schedule.paged) {
      rows = max<i64>(p.cache_layout.slot_rows, p.cache_layout.page_rows);
    }
    const RecordRow<const u8> record(kLayout.dims, found.page, found.row, rows, p.k.strides[2]);
    const u8* const from = found.is_there ? record.stored : p.k.data;
    constexpr i32 kLanes = 8;  // that have vectors side by side of a key
#pragma unroll
    for (i32 first = 0; first < kConfig.warp_keys(); first += 32 / kLanes) {
      fetch_vectors<kVectors / kLanes>(from, first + lane() / kLanes, lane() % kLanes, kLanes,
                                       found.word, true);
    }
    constexpr i32 kRest = kVectors % kLanes, kAtOnce = 32 / kRest;  // keys
#pragma unroll
    for (i32 first = 0; first < kConfig.warp_keys(); first += kAtOnce) {
      const i32 own = lane() / kRest;
      fetch_vectors<1>(from, first + own, kVectors - kRest + lane() % kRest, 0, found.word,
                       own < min(kAtOnce, kConfig.warp_keys() - first));
    }
    ptx::cp_async_commit();
    if constexpr (kHasPageScales) {
      if (found.is_there) return *reinterpret_cast<const ptx::U32x2*>(record.scales);
    }
    return {};
  }

  // Every step-th vector of a key from `vector` on, if the lane has any to fetch; zeros unless the
  // key is there. from: where the key of each lane lies. All lanes together.
  template <i32 kCount>
  void fetch_vectors(const u8* from, i32 key, i32 vector, i32 step, u32 word, bool is_any) const {
    const u64 of_key = of_lane(reinterpret_cast<u64>(from), key);
    if (!is_any) return;
    const u8* const row = reinterpret_cast<const u8*>(of_key) + vector * 16;
    const u32 to = shared.record(warp, buffer, key) + vector * 16;
    const bool is_there = (word >> key & 1) == 0;
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      ptx::cp_async_16(to + i * step * 16, row + i * step * 16, is_there);
    }
  }

  // The block that was asked for last but kPending, in the buffer before this one.
  template <i32 kPending>
  void widen_block() {
    static_assert(Config::kRecordBuffers == 2);
    const u32 from = buffer ^ kPending;
    ptx::cp_async_wait<kPending>();
    if constexpr (kHasPageScales) {
      if (lane() < kConfig.warp_keys()) {
        ptx::store_shared_x2(shared.record(warp, from, lane()) + Config::kScalesAt, scales);
      }
    }
    ptx::warp_sync();  // lanes -> what they copied
    mark_rounded(from);
#pragma unroll 1
    for (i32 half = 0; half < 2; ++half) {
      ptx::mbarrier_wait(shared.empty(before.index, half), before.phase ^ 1);
#pragma unroll
      for (i32 i = 0; i < kHalfPieces; ++i) widen_piece(from, half * kHalfPieces + i);
      if (half == 1) {
        copy_rotary(from);
        if (lane() == 0) ptx::store_shared(shared.missing(before.index, warp), missing);
      }
      ptx::warp_sync();  // the warp's keys of the half are there
      if (lane() == 0) ptx::mbarrier_arrive(shared.full(before.index, half * kHalfPieces));
    }
  }

  // Other products would be rounded, which scores are not to be: rows that see one are computed
  // again.
  void mark_rounded(u32 from) {
    bool is_rounded = false;
    if (lane() < kConfig.warp_keys() && (missing >> lane() & 1) == 0) {
      const u32 record = shared.record(warp, from, lane());
#pragma unroll
      for (i32 group = 0; group < i32(kLayout.stored() / kLayout.group); ++group) {
        is_rounded |= !is_exact_scale(__builtin_bit_cast(u32, scale_of(record, group)));
      }
    }
    if (ptx::any(is_rounded)) missing |= 1u << 31;
  }

  // Four lanes have 64 numbers of a key, 16 each, and their neighbours those of the key behind it:
  // so reads and writes of eight lanes meet all banks.
  void widen_piece(u32 from, i32 piece) const {
    constexpr i32 kStored = i32(kLayout.stored()), kGroup = i32(kLayout.group);
    constexpr i32 kTurns = kConfig.warp_keys() / 4;
    const i32 tile = piece * Config::kPieceTiles + lane() / 8 % 2, quarter = lane() % 4;
    const i32 first = lane() / 16 * 2 + lane() / 4 % 2;
    if (tile * Config::kColumns >= kStored) return;
    ptx::U32x4 bytes[kTurns];
    u32 scale[kTurns];  // twice
#pragma unroll
    for (i32 n = 0; n < kTurns; ++n) {
      const u32 record = shared.record(warp, from, first + 4 * n);
      bytes[n] = ptx::load_shared_x4(record + u32(tile * Config::kColumns + quarter * 16));
      const float own = scale_of(record, tile * Config::kColumns / kGroup);
      scale[n] = ptx::pack<DType::kFloat16>(own, own);
    }
    const MlaTile to = shared.keys(before.index, tile);
#pragma unroll
    for (i32 n = 0; n < kTurns; ++n) {
      const u32 row = static_cast<u32>(mla_key(warp, first + 4 * n));
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        ptx::store_shared_x4(
            to.unit(row, static_cast<u32>(2 * quarter + h)),
            widened_record(bytes[n].word[2 * h], bytes[n].word[2 * h + 1], scale[n]));
      }
    }
  }

  static float scale_of(u32 record, i32 group) {
    if constexpr (!kHasPageScales) {
      const u32 at = record + static_cast<u32>(kLayout.stored()) + static_cast<u32>(group) * 4;
      return __builtin_bit_cast(float, ptx::load_shared(at));
    }
    const u32 word = ptx::load_shared(record + Config::kScalesAt + static_cast<u32>(group) / 4 * 4);
    return power_of(static_cast<u8>(word >> group % 4 * 8));
  }

  // The last 64 numbers are bfloat16. Where they are values they become float16; rows that see a
  // key of whose numbers that keeps too few bits are computed again.
  void copy_rotary(u32 from) {
    constexpr u32 kAt = kHasPageScales ? 448 : 528;
    constexpr i32 kTurns = kConfig.warp_keys() / 4;
    const u32 vector = static_cast<u32>(lane() % 8);
    ptx::U32x4 x[kTurns];
    bool is_rounded = false;
#pragma unroll
    for (i32 n = 0; n < kTurns; ++n) {
      const i32 i = lane() / 8 + 4 * n;
      x[n] = ptx::load_shared_x4(shared.record(warp, from, i) + kAt + vector * 16);
      if constexpr (kHasPageScales) is_rounded |= narrow_positions(x[n]);
    }
    if (ptx::any(is_rounded)) missing |= 1u << 31;
    const MlaTile to = shared.keys(before.index, kConfig.key_tiles() - 1);
#pragma unroll
    for (i32 n = 0; n < kTurns; ++n) {
      const i32 i = lane() / 8 + 4 * n;
      ptx::store_shared_x4(to.unit(static_cast<u32>(mla_key(warp, i)), vector), x[n]);
    }
  }
};

}  // namespace fulmen
