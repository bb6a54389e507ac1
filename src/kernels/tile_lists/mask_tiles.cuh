// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// mask_tiles_sm90: which tiles of pairs a user's mask leaves, and which it shows whole, pair by
// pair. A thread block has the 32 tiles of a group of a part of a line
// (kernels/tile_lists/config.h), a warp four of them at a time: what the mask needs of the rows, or
// keys, of the tiles lies in its lanes, and what it needs of the part's goes round.
#pragma once

#include "kernels/common/expression.cuh"
#include "kernels/common/fast_score_mod.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/tile_lists/config.h"

namespace fulmen {

template <i32 kCount>
struct Words {
  u32 word[kCount];
};

// The value of lane `lane`, of whole words.
template <class T>
T value_of_lane(const T& x, u32 lane) {
  auto words = __builtin_bit_cast(Words<i32(sizeof(T)) / 4>, x);
#pragma unroll
  for (u32& word : words.word) word = u32(ptx::shuffle(i32(word), lane));
  return __builtin_bit_cast(T, words);
}

template <MaskTilesConfig kConfig>
struct MaskTiles {
  using User = UserExpression<FastMath<typename ElementOf<kConfig.dtype>::Real>>;
  static constexpr i32 kTiles = 4;                                       // of a warp at a time
  static constexpr i32 kPerTile = i32(ceil_div(kConfig.tile_rows, 32));  // lines of a lane
  static constexpr u32 kMet = 1, kWhole = 2;

  // What the mask needs of a row, or of a key.
  struct alignas(8) Row {
    typename User::Row values;
    bool outside;
  };
  struct alignas(8) Key {
    typename User::Column values;
    bool outside;
  };

  const TileListsParams& params;
  const ExpressionParams& e;
  SequenceShape shape;
  ExpressionPair pair;
  i32 lane;

  Row row(i32 i) const {
    ExpressionPair at = pair;
    at.i = i;
    at.p = shape.position(i);
    Row made{};
    made.values = User::row(e, at, made.outside);
    return made;
  }
  Key key(i32 j, const Row& any) const {
    ExpressionPair at = pair;
    at.j = j;
    Key made{};
    made.values = User::column(e, any.values, at, made.outside);
    return made;
  }

  // Whether a pair is shown; suspect: an index of its own was out of range.
  bool shows(const Row& row, const Key& key, bool& suspect) const {
    bool beyond = false;
    const bool shown = User::shows(e, row.values, key.values, beyond);
    suspect |= beyond;
    return shown;
  }

  // An index out of range is a fault where the pair is visible to intervals, too.
  void report_visible(Interval rows, Interval keys) const {
    bool outside = false;
#pragma unroll 1
    for (i64 i = rows.begin; i < rows.end; ++i) {
      const Interval visible = visible_columns(effective_mask<kConfig>(params.mask), shape, i);
      const Row own = row(i32(i));
#pragma unroll 1
      for (i64 j = keys.begin + lane; j < keys.end; j += 32) {
        const Key other = key(i32(j), own);
        bool suspect = own.outside || other.outside;
        const bool shown = shows(own, other, suspect);
        outside |= shown && suspect && visible.contains(j);
      }
    }
    report_outside(e, outside);
  }

  // Kinds of kTiles tiles, of rows or keys from `across` on, beside those of a part from `first`
  // on. What lies past the end is the last again, which changes nothing.
  void kinds(i32 first, i32 across, u32 (&kinds)[kTiles]) const {
    constexpr i32 kLines = kTiles * kPerTile;
    const i32 end = kConfig.by_keys ? shape.kv_len : shape.q_len;  // of the part's side
    const i32 end_across = kConfig.by_keys ? shape.q_len : shape.kv_len;
    const i32 count = min(end - first, kPartRows);
#pragma unroll
    for (u32& kind : kinds) kind = 0;
    if (count <= 0 || across >= end_across) return;
    i32 at[kLines];          // of the lane, in the tiles
    i32 shown[kTiles] = {};  // pairs
    bool suspect = false;
#pragma unroll
    for (i32 n = 0; n < kLines; ++n) {
      const i32 within = min(n % kPerTile * 32 + lane, kConfig.tile_rows - 1);
      at[n] = min(across + n / kPerTile * kConfig.tile_rows + within, end_across - 1);
    }
    const i32 own_at[2] = {min(first + lane, end - 1), min(first + 32 + lane, end - 1)};
    if constexpr (kConfig.by_keys) {
      Row rows[kLines];
#pragma unroll
      for (i32 n = 0; n < kLines; ++n) rows[n] = row(at[n]);
      const Key own[2] = {key(own_at[0], rows[0]), key(own_at[1], rows[0])};
#pragma unroll 1
      for (i32 j = 0; j < count; ++j) {
        const Key other = value_of_lane(j < 32 ? own[0] : own[1], j % 32);
#pragma unroll
        for (i32 n = 0; n < kLines; ++n) shown[n / kPerTile] += shows(rows[n], other, suspect);
      }
    } else {
      const Row own[2] = {row(own_at[0]), row(own_at[1])};
      suspect = own[0].outside || own[1].outside;
      Key keys[kLines];
#pragma unroll
      for (i32 n = 0; n < kLines; ++n) {
        keys[n] = key(at[n], own[0]);
        suspect |= keys[n].outside;
      }
#pragma unroll 1
      for (i32 i = 0; i < count; ++i) {
        const Row other = value_of_lane(i < 32 ? own[0] : own[1], i % 32);
#pragma unroll
        for (i32 n = 0; n < kLines; ++n) shown[n / kPerTile] += shows(other, keys[n], suspect);
      }
      if (ptx::any(suspect)) {
        report_visible({first, first + count},
                       {across, min(across + kTiles * kConfig.tile_rows, end_across)});
      }
    }
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      const bool is_met = ptx::any(shown[t] > 0) && across + t * kConfig.tile_rows < end_across;
      const bool is_whole = !ptx::any(shown[t] < count * kPerTile);
      kinds[t] = (is_met ? kMet : 0) | (is_met && is_whole ? kWhole : 0);
    }
  }
};

template <MaskTilesConfig kConfig>
inline void mask_tiles_sm90(const TileListsParams& params) {
  using Tiles = MaskTiles<kConfig>;
  static_assert(MaskTilesConfig::kWarps * Tiles::kTiles == 32);
  const TileLists& lists = params.lists;
  const AttentionParams& p = params.attention;
  record_segment_faults(p, expression_of(params), kConfig.threads());
  const u32 line_rows = u32(kConfig.by_keys ? params.kv_rows : params.q_rows);
  // Block: (sequence, head, line, part, group).
  const u32 line_and_part = ptx::block_index() / u32(lists.groups);
  const i32 group = i32(ptx::block_index() - line_and_part * u32(lists.groups));
  const u32 number = line_and_part / (line_rows / kPartRows);
  const u32 part = line_and_part - number * (line_rows / kPartRows);
  const u32 head_and_index = number / u32(lists.lines);
  const u32 line = number - head_and_index * u32(lists.lines);
  const u32 index = head_and_index / u32(lists.heads);
  const u32 group_size = u32(p.heads_q) / u32(p.heads_kv);
  const u32 head =
      (head_and_index - index * u32(lists.heads)) * (u32(p.heads_q) / u32(lists.heads));
  const u32 warp = ptx::thread_index() / 32, lane = ptx::thread_index() % 32;
  const Sequence sequence =
      kConfig.score.varlen ? load_sequence(p, index) : dense_sequence(p, index);
  const SequenceShape& shape = sequence.shape;
  const ExpressionPair pair{index, head, head / group_size, shape.q_len, shape.kv_len};
  const Tiles tiles{params, expression_of(params), shape, pair, i32(lane)};
  u32 kinds[Tiles::kTiles];
  tiles.kinds(i32(line * line_rows + kPartRows * part),
              (32 * group + i32(warp) * Tiles::kTiles) * kConfig.tile_rows, kinds);
  const u32 shared = ptx::dynamic_shared();
#pragma unroll
  for (u32 t = 0; t < u32(Tiles::kTiles); ++t) {
    if (lane == t) ptx::store_shared(shared + 4 * (warp * Tiles::kTiles + t), kinds[t]);
  }
  ptx::block_sync();
  if (warp != 0) return;
  const u32 kind = ptx::load_shared(shared + 4 * lane);
  const u32 met = ptx::ballot((kind & Tiles::kMet) != 0);
  const u32 whole = ptx::ballot((kind & Tiles::kWhole) != 0);
  if (lane != 0) return;
  u32* const words = lists.words + (i64{number} * lists.groups + group) * 4;
  words[part] = met;
  words[2 + part] = whole;
}

}  // namespace fulmen
