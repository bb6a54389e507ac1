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
// them.
constexpr DecodeSm80Config mla_schedule() {
  DecodeSm80Config schedule;
  schedule.d_qk = 576;
  schedule.d_v = 512;
  schedule.row_warps = 4;
  schedule.splits = 1;
  schedule.kv_rows = 48;
  return schedule;
}

struct MlaSm90Config {
  DecodeSm80Config schedule = mla_schedule();

  static constexpr i32 kRows = 64;      // of all heads, in a row tile
  static constexpr i32 kKeys = 48;      // of a block of keys
  static constexpr i32 kDims = 576;     // of a key; its first 512 are its value
  static constexpr i32 kColumns = 64;   // of a tile: 128 bytes
  static constexpr i32 kTiles = 8;      // of a value; a key has one more
  static constexpr i32 kHalfTiles = 4;  // of the half of a value that a warpgroup sums
  static constexpr i32 kHalfDims = kHalfTiles * kColumns;
  static constexpr i32 kTileBytes = kKeys * 128;
  static constexpr i32 kRowTileBytes = kRows * 128;  // of Q and P
  static constexpr i32 kRegisterTiles = 6;           // of Q; the others lie in shared memory
  static constexpr i32 kPBuffers = 2;                // of P
  static constexpr i32 kStages = 3;                  // blocks of keys in shared memory
  static constexpr i32 kPieceTiles = 2;              // that land together
  static constexpr i32 kPieces = kTiles / kPieceTiles;
  static constexpr i32 kTasks = 8;  // row tiles that producers may be ahead of the others, and more

  // Warpgroups: two of values, one of scores, one that copies: each warp a piece of every block.
  static constexpr i32 threads() { return 4 * 128; }
  static constexpr i32 combine_threads() { return 8 * 128; }
  static constexpr i32 value_registers() { return 160; }
  static constexpr i32 score_registers() { return 152; }
  static constexpr i32 producer_registers() { return 40; }

  // Shared memory, in this order: blocks of keys, tiles of Q that are not in registers, P twice,
  // what O is multiplied by before P's product and whether it is, ends of rows, keys that rows see,
  // tasks and which of them are bad, words (KeyCounts has 36 of them), barriers.
  static constexpr i32 q_at() { return kStages * (kTiles + 1) * kTileBytes; }
  static constexpr i32 p_at() { return q_at() + (kTiles + 1 - kRegisterTiles) * kRowTileBytes; }
  static constexpr i32 factors_at() { return p_at() + kPBuffers * kRowTileBytes; }
  static constexpr i32 grew_at() { return factors_at() + kPBuffers * kRows * 4; }
  static constexpr i32 ends_at() { return grew_at() + kPBuffers * 16; }
  static constexpr i32 visible_at() { return ends_at() + kRows * 8; }
  static constexpr i32 tasks_at() { return visible_at() + kRows * 8; }
  static constexpr i32 bad_at() { return tasks_at() + kTasks * 64; }
  static constexpr i32 words_at() { return bad_at() + kTasks * 4; }
  static constexpr i32 barriers_at() { return words_at() + DecodeSm80Config::num_words() * 4; }
  static constexpr i32 num_barriers() { return kStages * (kPieces + 2) + kTasks + 6; }
  static constexpr i32 shared_bytes() { return barriers_at() + num_barriers() * 8; }

  // Shared memory of combine_mla: words, maxima and ends of all rows, O of all groups but one.
  static constexpr i32 combine_totals_at() { return DecodeSm80Config::num_words() * 4; }
  static constexpr i32 combine_sums_at() { return combine_totals_at() + kRows * 16; }
  static constexpr i32 combine_bytes() {
    return combine_sums_at() + (combine_threads() - 128) * 16;
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

// How blocks of keys are divided: among as few workers as leave none with more than its even share,
// since each makes a part.
constexpr KeyShares mla_shares(i32 blocks, i32 workers) {
  const i32 most = max(1, (blocks + workers - 1) / workers);
  return KeyShares(blocks, (blocks + most - 1) / most);
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
  // combine_mla: blocks for the parts of one row tile, which divide 64; whether there is one such
  // for each sequence and head of keys, or for each worker.
  i32 slices;
  bool by_sequence;
  float* parts;  // (block, 2, part_floats()): of a row tile's later keys, of its first
};

}  // namespace fulmen
