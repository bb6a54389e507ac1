// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// mask_tiles: which tiles of pairs a user's mask leaves, and which it shows whole. What the
// mask reads of a tile's rows and keys lies between two ends, and so does what it makes of them
// (attention/between.cuh): that decides most tiles. The others are looked at pair by pair: what the
// mask needs of the rows, or keys, of a tile lies in a warp's lanes, and what it needs of the
// part's goes round. A thread block has the 32 tiles of a group and kParts parts of lines
// (kernels/tile_lists/config.h), a warp four of the tiles.
#pragma once

#include "kernels/common/expression.cuh"
#include "kernels/common/fast_score_mod.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/tile_lists/config.h"

namespace fulmen {

inline i32 shuffle_xor(i32 x, u32 distance) { return i32(ptx::shuffle_xor(u32(x), distance)); }
inline float shuffle_xor(float x, u32 distance) { return ptx::shuffle_xor(x, distance); }
inline bool shuffle_xor(bool x, u32 distance) { return ptx::shuffle_xor(u32(x), distance) != 0; }
inline i64 shuffle_xor(i64 x, u32 distance) {
  const u32 low = ptx::shuffle_xor(u32(u64(x)), distance);
  return i64(u64(ptx::shuffle_xor(u32(u64(x) >> 32), distance)) << 32 | low);
}

// Of all lanes' values.
template <class T>
Between<T> over_warp(Between<T> x) {
#pragma unroll
  for (u32 distance = 16; distance >= 1; distance /= 2) {
    x = joined(x, Between<T>{shuffle_xor(x.least, distance), shuffle_xor(x.most, distance)});
  }
  return x;
}

template <MaskTilesConfig kConfig>
struct MaskTiles {
  using User = UserExpression<FastMath<typename ElementOf<kConfig.dtype>::Real>>;
  static constexpr i32 kTiles = 4;                                       // of a warp
  static constexpr i32 kPerTile = i32(ceil_div(kConfig.tile_rows, 32));  // rows or keys of a lane
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
  // Of all rows, or keys, of a part or a tile.
  template <class Bounds_>
  struct Box {
    using Bounds = Bounds_;
    Bounds bounds;
    bool outside;  // an index of one of them is out of range
  };
  using Rows = Box<typename User::RowBounds>;
  using Keys = Box<typename User::ColumnBounds>;

  const TileListsParams& params;
  const ExpressionParams& e;
  SequenceShape shape;
  ExpressionPair pair;
  i32 lane;
  Row any;  // for keys: what is the same for all rows

  i32 end() const { return kConfig.by_keys ? shape.kv_len : shape.q_len; }  // of the parts' side
  i32 end_across() const { return kConfig.by_keys ? shape.q_len : shape.kv_len; }

  Row row(i32 i) const {
    ExpressionPair at = pair;
    at.i = i;
    at.p = shape.position(i);
    Row made{};
    made.values = User::row(e, at, made.outside);
    return made;
  }
  Key key(i32 j) const {
    ExpressionPair at = pair;
    at.j = j;
    Key made{};
    made.values = User::column(e, any.values, at, made.outside);
    return made;
  }
  auto line_of_part(i32 at) const {
    if constexpr (kConfig.by_keys) {
      return key(at);
    } else {
      return row(at);
    }
  }
  auto line_across(i32 at) const {
    if constexpr (kConfig.by_keys) {
      return row(at);
    } else {
      return key(at);
    }
  }

  // Number n of the lane's, of the `size` lines from `first` on; past the end the last.
  static i32 line_of_lane(i32 first, i32 n, i32 size, i32 end, i32 lane) {
    return min(first + min(32 * n + lane, size - 1), end - 1);
  }

  // Of `size` lines.
  template <i32 kSize, class Box, class Line>
  Box box(i32 first, i32 end, const Line& line) const {
    Box all{};
#pragma unroll
    for (i32 n = 0; n < ceil_div(kSize, 32); ++n) {
      const auto own = line(line_of_lane(first, n, kSize, end, lane));
      const auto bounds = User::bounds_of(own.values);
      if (n == 0) all.bounds = bounds;
      User::each(all.bounds, bounds, [](auto& x, const auto& y) { x = joined(x, y); });
      all.outside |= own.outside;
    }
    User::each(all.bounds, all.bounds, [](auto& x, const auto& y) { x = over_warp(y); });
    all.outside = ptx::any(all.outside);
    return all;
  }
  template <i32 kSize>
  Rows rows(i32 first) const {
    return box<kSize, Rows>(first, shape.q_len, [this](i32 i) { return row(i); });
  }
  template <i32 kSize>
  Keys keys(i32 first) const {
    return box<kSize, Keys>(first, shape.kv_len, [this](i32 j) { return key(j); });
  }
  auto part(i32 first) const {
    if constexpr (kConfig.by_keys) {
      return keys<kPartRows>(first);
    } else {
      return rows<kPartRows>(first);
    }
  }
  auto tile(i32 first) const {
    if constexpr (kConfig.by_keys) {
      return rows<kConfig.tile_rows>(first);
    } else {
      return keys<kConfig.tile_rows>(first);
    }
  }

  // Whether pairs of a part and a tile are shown: none, all, or it is not known.
  static Integers shown(const Rows& rows, const Keys& keys) {
    if (rows.outside || keys.outside) return kEither;
    return User::shows_between(rows.bounds, keys.bounds);
  }
  static Integers shown(const Keys& part, const Rows& tile) { return shown(tile, part); }

  // Whether a pair is shown; suspect: an index of its own was out of range.
  bool shows(const Row& row, const Key& key, bool& suspect) const {
    bool beyond = false;
    const bool shown = User::shows(e, row.values, key.values, beyond);
    suspect |= beyond;
    return shown;
  }
  bool shows(const Key& key, const Row& row, bool& suspect) const {
    return shows(row, key, suspect);
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
        const Key other = key(i32(j));
        bool suspect = own.outside || other.outside;
        const bool shown = shows(own, other, suspect);
        outside |= shown && suspect && visible.contains(j);
      }
    }
    report_outside(e, outside);
  }

  // The kind of a tile, pair by pair, by all lanes. What lies past the end is the last again, which
  // changes nothing.
  u32 kind_of_pairs(i32 first, i32 across) const {
    const i32 count = min(end() - first, kPartRows);
    decltype(line_of_part(0)) own[2];
    decltype(line_across(0)) others[kPerTile];
    bool suspect = false;
    i32 shown = 0;
#pragma unroll
    for (i32 n = 0; n < 2; ++n) {
      own[n] = line_of_part(line_of_lane(first, n, kPartRows, end(), lane));
      suspect |= own[n].outside;
    }
#pragma unroll
    for (i32 n = 0; n < kPerTile; ++n) {
      others[n] = line_across(line_of_lane(across, n, kConfig.tile_rows, end_across(), lane));
      suspect |= others[n].outside;
    }
#pragma unroll 1
    for (i32 i = 0; i < count; ++i) {
      const auto of_part = value_of_lane(i < 32 ? own[0] : own[1], i % 32);
#pragma unroll
      for (i32 n = 0; n < kPerTile; ++n) shown += shows(of_part, others[n], suspect);
    }
    // By queries alone: the same pairs once.
    if (!kConfig.by_keys && ptx::any(suspect)) {
      report_visible({first, first + count},
                     {across, min(across + kConfig.tile_rows, end_across())});
    }
    const bool is_met = ptx::any(shown > 0);
    const bool is_whole = !ptx::any(shown < count * kPerTile);
    return (is_met ? kMet : 0) | (is_whole ? kWhole : 0);
  }

  // Kinds of kTiles tiles from `across` on beside each part from `first` on, one word a tile.
  void run(i32 first, i32 across, u32 kinds) const {
    decltype(tile(0)) own{};  // of lane t: of tile t
#pragma unroll
    for (i32 t = 0; t < kTiles && end_across() > 0; ++t) {
      const auto made = tile(min(across + t * kConfig.tile_rows, end_across() - 1));
      if (lane % kTiles == t) own = made;
    }
#pragma unroll 1
    for (i32 n = 0; n < MaskTilesConfig::kParts; ++n, first += kPartRows) {
      u32 kind = 0;
      const bool exists =
          first < end() && across + lane % kTiles * kConfig.tile_rows < end_across();
      if (first < end()) {
        const Integers all = shown(part(first), own);
        if (exists && all.least == 1) kind = kMet | kWhole;
        u32 unknown = ptx::ballot(exists && lane < kTiles && all.least != all.most);
#pragma unroll 1
        for (; unknown != 0; unknown &= unknown - 1) {
          const i32 t = ptx::count_ones((unknown & (0 - unknown)) - 1);  // the lowest bit
          const u32 found = kind_of_pairs(first, across + t * kConfig.tile_rows);
          if (lane == t) kind = found;
        }
      }
      if (lane < kTiles) ptx::store_shared(kinds + 4 * (32 * n + lane), kind);
    }
  }
};

template <MaskTilesConfig kConfig>
inline void mask_tiles(const TileListsParams& params) {
  using Tiles = MaskTiles<kConfig>;
  static_assert(MaskTilesConfig::kWarps * Tiles::kTiles == 32);
  static_assert(MaskTilesConfig::kWarps == MaskTilesConfig::kParts);
  const TileLists& lists = params.lists;
  const AttentionParams& p = params.attention;
  record_segment_faults<typename Tiles::User>(p, expression_of(params), kConfig.threads());
  // Block: (sequence, head, kParts parts, group).
  const u32 parts_of_line = u32(kConfig.by_keys ? params.kv_rows : params.q_rows) / kPartRows;
  const u32 parts = u32(lists.lines) * parts_of_line;
  const u32 rounds = u32(ceil_div(parts, u32(MaskTilesConfig::kParts)));
  const u32 round_and_head = ptx::block_index() / u32(lists.groups);
  const i32 group = i32(ptx::block_index() - round_and_head * u32(lists.groups));
  const u32 head_and_index = round_and_head / rounds;
  const u32 first_part = (round_and_head - head_and_index * rounds) * MaskTilesConfig::kParts;
  const u32 index = head_and_index / u32(lists.heads);
  const u32 group_size = u32(p.heads_q) / u32(p.heads_kv);
  const u32 head =
      (head_and_index - index * u32(lists.heads)) * (u32(p.heads_q) / u32(lists.heads));
  const u32 warp = ptx::thread_index() / 32, lane = ptx::thread_index() % 32;
  const Sequence sequence =
      kConfig.score.varlen ? load_sequence(p, index) : dense_sequence(p, index);
  const SequenceShape& shape = sequence.shape;
  const ExpressionPair pair{index, head, head / group_size, shape.q_len, shape.kv_len};
  Tiles tiles{params, expression_of(params), shape, pair, i32(lane)};
  const i32 across = (32 * group + i32(warp) * Tiles::kTiles) * kConfig.tile_rows;
  const u32 shared = ptx::dynamic_shared();
  if (shape.q_len > 0) tiles.any = tiles.row(0);
  tiles.run(i32(first_part * kPartRows), across, shared + 4 * warp * Tiles::kTiles);
  ptx::block_sync();
  // A warp a part.
  const u32 part = first_part + warp;
  const u32 kind = ptx::load_shared(shared + 4 * (32 * warp + lane));
  const u32 met = ptx::ballot((kind & Tiles::kMet) != 0);
  const u32 whole = ptx::ballot((kind & Tiles::kWhole) != 0);
  if (lane != 0 || part >= parts) return;
  const u32 line = part / parts_of_line;
  u32* const words =
      lists.words + ((i64{head_and_index} * lists.lines + line) * lists.groups + group) * 4;
  words[part - line * parts_of_line] = met;
  words[2 + part - line * parts_of_line] = whole;
}

}  // namespace fulmen
