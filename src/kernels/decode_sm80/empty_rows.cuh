// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows that no block of keys is for: o = 0, lse = -inf.
#pragma once

#include "kernels/decode_sm80/result.cuh"

namespace fulmen {

template <DecodeSm80Config kConfig>
struct EmptyRows {
  const AttentionParams& p;
  ScoreUnit unit;
  i32 group;
  i32 row_tile;

  // Those of sequences that see no key, in this row tile. Warps of so many workers, each with
  // `warps` of them, divide the sequences.
  template <class Counts>
  void clear_sequences(const Counts& counts, i32 worker, i32 workers, i32 warps) const {
    const i32 warp = worker * warps + static_cast<i32>(warp_index());
    for (i64 at = warp; at < p.num_sequences; at += workers * warps) {
      const i32 index = static_cast<i32>(at);
      if (counts.count_of(index) != 0) continue;
      const DecodeSequence sequence = decode_sequence<kConfig>(p, index);
      for (i32 kv_head = 0; kv_head < p.heads_kv / kConfig.heads; ++kv_head) {
        clear(row_tile, kv_head, index, sequence);
      }
    }
  }

  // Those of a packed q past the last offset, in all row tiles; by one warp of a block.
  void clear_rest() const {
    if (warp_index() != 0) return;
    const i64 last = load_index(p.cu_q, p.num_sequences * p.cu_q.strides[3]);
    DecodeSequence rest{};
    rest.q_begin = static_cast<i32>(clamp<i64>(last, 0, p.q_rows));
    rest.shape.q_len = static_cast<i32>(p.q_rows) - rest.q_begin;
    for (i32 kv_head = 0; kv_head < p.heads_kv / kConfig.heads; ++kv_head) {
      for (i32 tile = 0; tile * kConfig.rows() < rest.shape.q_len * group; ++tile) {
        clear(tile, kv_head, 0, rest);
      }
    }
  }

  // All lanes of a warp.
  void clear(i32 tile_number, i32 kv_head, i32 index, const DecodeSequence& sequence) const {
    constexpr i32 kQuads = kConfig.d_v / 4;
    const RowTile<kConfig> tile(p, unit, group, tile_number * kConfig.rows(), kv_head, index,
                                sequence);
    const StoreRowTile<kConfig> result{tile};
    for (i32 n = static_cast<i32>(lane_index()); n < tile.num_rows() * kQuads; n += 32) {
      result.clear(n / kQuads, n % kQuads);
    }
  }
};

}  // namespace fulmen
