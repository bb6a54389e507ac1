// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which tiles of pairs the Hopper kernels meet, as bits, where lists of blocks or a user's mask say
// so. A kernel walks along a line, a tile of query rows or of keys, over the tiles of the other
// side; a line consists of parts of 64 rows, one for each warpgroup, since blocks of lists may be
// as small. Filled on the device before each run: from lists by tile_lists/list_tiles.cuh, by a
// mask by tile_lists/mask_tiles.cuh.
#pragma once

#include "kernels/params.h"
#include "kernels/score_options.h"

namespace fulmen {

inline constexpr i32 kPartRows = 64;  // of a part of a line; it divides every block of lists

struct TileLists {
  u32* words;     // (sequence or 1, head or what heads share or 1, line, group of 32 tiles, word)
  i32 lines;      // of a head
  i32 groups;     // of a line
  i32 heads;      // that have lines of their own
  bool by_batch;  // likewise sequences

  // The number of a line; past the end, of a sequence longer than it may be, that of the last.
  constexpr i64 line_number(i64 index, i64 head, i64 heads_q, i32 line) const {
    const i64 list = (by_batch ? index : 0) * heads + list_of_head(head, heads_q, heads);
    return list * lines + min(line, lines - 1);
  }
};

// A line as a kernel reads it. Words of a group: for each part which tiles it meets, then, of a
// mask, which of them are shown whole. Bit t: tile t.
template <i32 kParts, bool kHasWhole>
struct TileLine {
  static constexpr i32 kWords = kHasWhole ? 4 : 2;

  const u32* words;

  TileLine() = default;
  TileLine(const TileLists& lists, i64 number)
      : words(lists.words + number * lists.groups * kWords) {}

  // Tiles of [begin, end) in a group that any part meets.
  u32 met(i32 group, i32 begin, i32 end) const {
    u32 bits = words[group * kWords];
    if constexpr (kParts > 1) bits |= words[group * kWords + 1];
    const i32 first = 32 * group;
    if (begin > first) bits &= ~0u << (begin - first);
    if (end < first + 32) bits &= ~(~0u << (end - first));
    return bits;
  }
  bool is_met(i32 tile, i32 part) const { return bit(tile, part); }
  // Whether lists, or the mask, hide none of it.
  bool is_whole(i32 tile, i32 part) const { return bit(tile, kHasWhole ? 2 + part : part); }

 private:
  bool bit(i32 tile, i32 word) const {
    return (words[tile / 32 * kWords + word] >> tile % 32 & 1) != 0;
  }
};

// by_keys: lines are tiles of keys, and what is walked over tiles of queries.
struct TileListsConfig {
  bool by_keys = false;

  static constexpr i32 kThreads = 128;
};

template <class Each>
constexpr void for_each_field(const TileListsConfig& config, Each each) {
  each("by_keys", config.by_keys);
}

struct MaskTilesConfig {
  DType dtype = DType::kBFloat16;
  bool by_keys = false;
  i32 tile_rows = 64;  // rows, or keys, of a tile across the lines
  ScoreOptions score;  // mask_kind, varlen and user alone

  static constexpr i32 kWarps = 8;
  static constexpr i32 kParts = 8;                      // of a thread block, one behind the other
  static constexpr i32 kSharedBytes = kParts * 32 * 4;  // kinds of the tiles of a group
  constexpr i32 threads() const { return 32 * kWarps; }
};

template <class Each>
constexpr void for_each_field(const MaskTilesConfig& config, Each each) {
  each("dtype", config.dtype);
  each("by_keys", config.by_keys);
  each("tile_rows", config.tile_rows);
  each("score", config.score);
}

struct TileListsParams {
  TileLists lists;
  i32 q_rows;  // of a tile
  i32 kv_rows;
  i32 q_blocks;   // of lists: how many a head has
  i32 num_lists;  // of all heads and sequences
  IntervalMask mask;
  AttentionParams attention;
};

}  // namespace fulmen
