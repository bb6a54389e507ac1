// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What mla_sm90 is compiled to know of a call, and how its shared memory and workspace are laid
// out.
#pragma once

#include "kernels/decode_sm80/config.h"
#include "kernels/params.h"

namespace fulmen {

// Lengths, pages and masks, and how keys are divided among blocks of the grid: as decode_sm80 has
// them. A block of keys has two halves, one for each warpgroup.
constexpr DecodeSm80Config mla_schedule() {
  DecodeSm80Config schedule;
  schedule.d_qk = 576;
  schedule.d_v = 512;
  schedule.row_warps = 4;
  schedule.splits = 2;
  schedule.kv_rows = 64;
  return schedule;
}

struct MlaSm90Config {
  DecodeSm80Config schedule = mla_schedule();

  static constexpr i32 kRows = 64;      // of all heads, in a row tile
  static constexpr i32 kKeys = 64;      // of a half
  static constexpr i32 kDims = 576;     // of a key; its first 512 are its value
  static constexpr i32 kColumns = 64;   // of a tile: 128 bytes
  static constexpr i32 kTiles = 9;      // of a key
  static constexpr i32 kHalfTiles = 4;  // of the half of a value that a warpgroup sums
  static constexpr i32 kHalfDims = kHalfTiles * kColumns;
  static constexpr i32 kTileBytes = kKeys * 128;  // also of Q and P

  // Two warpgroups and one, of which a warp copies.
  static constexpr i32 threads() { return 3 * 128; }
  static constexpr i32 combine_threads() { return 4 * 128; }
  static constexpr i32 consumer_registers() { return 232; }
  static constexpr i32 producer_registers() { return 40; }

  // Shared memory, in this order: Q, the two halves of a block of keys, P, the reference of every
  // row of P and which of them grew, sums of the rows of each warpgroup, words (KeyCounts has 36 of
  // them), barriers.
  static constexpr i32 keys_at() { return kTiles * kTileBytes; }
  static constexpr i32 p_at() { return keys_at() + 2 * kTiles * kTileBytes; }
  static constexpr i32 references_at() { return p_at() + kTileBytes; }
  static constexpr i32 grew_at() { return references_at() + kRows * 4; }
  static constexpr i32 sums_at() { return grew_at() + 32; }
  static constexpr i32 words_at() { return sums_at() + 2 * kRows * 4; }
  static constexpr i32 bad_at() { return words_at() + DecodeSm80Config::num_words() * 4; }
  static constexpr i32 barriers_at() { return bad_at() + 16; }
  static constexpr i32 num_barriers() { return 2 * (kTiles + 3); }
  static constexpr i32 shared_bytes() { return barriers_at() + num_barriers() * 8; }

  // Shared memory of combine_mla: words, the sums of all rows, O of all groups but one.
  static constexpr i32 combine_totals_at() { return DecodeSm80Config::num_words() * 4; }
  static constexpr i32 combine_sums_at() { return combine_totals_at() + kRows * 8; }
  static constexpr i32 combine_bytes() {
    return combine_sums_at() + (combine_threads() - 128) * 32;
  }

  // A partial result in the workspace: O as the registers of the warpgroups have it, then maximum
  // and sum of every row.
  static constexpr i32 states_at() { return kRows * 512; }  // floats
  static constexpr i32 part_floats() { return states_at() + 2 * kRows; }
};

template <class Each>
constexpr void for_each_field(const MlaSm90Config& config, Each each) {
  each("schedule", config.schedule);
}

// kv: box (64, rows of a box of keys); dims (d, key, head, sequence), or of pools of pages (d, row
// of the page, head, page). 16 bits, swizzle of 128 bytes, zero fill.
struct MlaSm90Arguments {
  TensorMap kv;
  AttentionParams attention;
  ScoreUnit unit;  // of scores, before the softmax
  i32 group;       // heads of q that share one of k and v
  i32 row_tiles;   // of a head of k and v; divides the grid
  i32 workers;     // blocks of mla_sm90 of a row tile
  // combine_mla: blocks for the parts of one row tile, which divide 32; whether there is one such
  // for each sequence and head of keys, or for each worker.
  i32 slices;
  bool by_sequence;
  float* parts;  // (block, 2, part_floats()): of a row tile's later keys, of its first
};

}  // namespace fulmen
