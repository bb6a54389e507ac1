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
  // Keys lie each where a table says: those of slots, of small pages, and records (what a row of
  // them has in bytes; else 0).
  bool gathers = false;
  bool several = true;  // sequences: where they are as long, shares end where row tiles do
  i32 record = 0;

  static constexpr i32 kRecordKeys =
      32;  // of a block of records: in memory they have a place of their own
  static constexpr i32 kRows = 64;      // of all heads, in a row tile
  static constexpr i32 kDims = 576;     // of a key; its first 512 are its value
  static constexpr i32 kColumns = 64;   // of a tile: 128 bytes
  static constexpr i32 kTiles = 8;      // of a value; a key has one more
  static constexpr i32 kHalfTiles = 4;  // of the half of a value that a warpgroup sums
  static constexpr i32 kHalfDims = kHalfTiles * kColumns;
  static constexpr i32 kRowTileBytes = kRows * 128;  // of Q and P
  static constexpr i32 kPBuffers = 2;                // of P
  static constexpr i32 kPieceTiles = 2;              // that land together
  static constexpr i32 kPieces = kTiles / kPieceTiles;
  static constexpr i32 kTasks = 8;  // row tiles that producers may be ahead of the others, and more
  static constexpr i32 kProducers = 4;      // warps
  static constexpr i32 kRecordBuffers = 2;  // of records as they are in memory
  static constexpr i32 kRecordRow = 704;    // bytes there, scales among them
  static constexpr i32 kScalesAt = 576;     // of records of 584 bytes

  constexpr i32 keys() const { return schedule.block_keys(); }
  constexpr i32 warp_keys() const { return keys() / kProducers; }  // where they are gathered
  constexpr i32 tile_bytes() const { return keys() * 128; }
  constexpr i32 stages() const { return record != 0 ? 2 : 3; }  // blocks of keys in shared memory
  // Of Q, in the registers of the scores; the others lie in shared memory.
  constexpr i32 register_tiles() const { return gathers ? 5 : 6; }
  constexpr i32 key_tiles() const { return record == 584 ? kTiles : kTiles + 1; }
  // Pieces of a block that are handed over together, by the barrier of the first.
  constexpr i32 pieces_together() const {
    if (!gathers) return 1;
    return record != 0 ? kPieces / 2 : kPieces;
  }
  // Of one block's copies to one barrier.
  constexpr u32 arrivals() const { return gathers ? kProducers : 1; }

  // Warpgroups: two of values, one of scores, one that copies: each warp a piece of every block.
  static constexpr i32 threads() { return 4 * 128; }
  static constexpr i32 combine_threads() { return 8 * 128; }
  static constexpr i32 value_registers() { return 160; }
  constexpr i32 score_registers() const { return gathers ? 136 : 152; }
  constexpr i32 producer_registers() const { return gathers ? 56 : 40; }

  // Shared memory, in this order: blocks of keys, tiles of Q that are not in registers, P twice,
  // records, what O is multiplied by before P's product and whether it is, ends of rows, keys that
  // rows see, tasks and which of them are bad, which keys are not there, words (KeyCounts has 36 of
  // them), barriers.
  constexpr i32 q_at() const { return stages() * (kTiles + 1) * tile_bytes(); }
  constexpr i32 p_at() const { return q_at() + (kTiles + 1 - register_tiles()) * kRowTileBytes; }
  constexpr i32 records_at() const { return p_at() + kPBuffers * kRowTileBytes; }
  constexpr i32 record_bytes() const { return record != 0 ? warp_keys() * kRecordRow : 0; }
  constexpr i32 factors_at() const {
    return records_at() + kProducers * kRecordBuffers * record_bytes();
  }
  constexpr i32 grew_at() const { return factors_at() + kPBuffers * kRows * 4; }
  constexpr i32 ends_at() const { return grew_at() + kPBuffers * 16; }
  constexpr i32 visible_at() const { return ends_at() + kRows * 8; }
  constexpr i32 tasks_at() const { return visible_at() + kRows * 8; }
  constexpr i32 bad_at() const { return tasks_at() + kTasks * 64; }
  constexpr i32 missing_at() const { return bad_at() + kTasks * 4; }
  constexpr i32 words_at() const { return missing_at() + (gathers ? stages() * 16 : 0); }
  constexpr i32 barriers_at() const { return words_at() + DecodeSm80Config::num_words() * 4; }
  constexpr i32 num_barriers() const { return stages() * (kPieces + 2) + kTasks + 6; }
  constexpr i32 shared_bytes() const { return barriers_at() + num_barriers() * 8; }

  // Shared memory of combine_mla: words, maxima and ends of all rows, O of all groups but one.
  static constexpr i32 combine_totals_at() { return DecodeSm80Config::num_words() * 4; }
  static constexpr i32 combine_sums_at() { return combine_totals_at() + kRows * 16; }
  // Eights of dims that are added together: a block has at least as many.
  constexpr i32 combine_eights() const { return schedule.may_recompute() ? 4 : 1; }
  constexpr i32 combine_bytes() const {
    return combine_sums_at() + combine_eights() * (combine_threads() - 128) * 16;
  }

  // A partial result in the workspace: O as the registers of the warpgroups have it, then maximum
  // and sum of every row.
  static constexpr i32 states_at() { return kRows * 512; }  // floats
  static constexpr i32 part_floats() { return states_at() + 2 * kRows; }
};

template <class Each>
constexpr void for_each_field(const MlaSm90Config& config, Each each) {
  each("schedule", config.schedule);
  each("gathers", config.gathers);
  each("several", config.several);
  each("record", config.record);
}

// How blocks of keys are divided among workers: evenly; or, with runs, so run by run, each among
// workers of its own.
template <bool kRuns>
struct MlaShares {
  i32 num_chunks;
  i32 run;  // blocks
  KeyShares of_run;

  constexpr MlaShares(i32 blocks, i32 run_, i32 workers_of_run)
      : num_chunks(blocks), run(max(1, run_)), of_run(run_, workers_of_run) {}

  constexpr i32 num_workers() const {
    if constexpr (!kRuns) return of_run.num_workers;
    return max(1, (num_chunks + run - 1) / run * of_run.num_workers);
  }
  constexpr i32 begin(i32 worker) const {
    if constexpr (!kRuns) return of_run.begin(worker);
    const i32 number = worker / of_run.num_workers;
    return min(num_chunks, number * run + of_run.begin(worker - number * of_run.num_workers));
  }
  // The worker that has block number `block`.
  constexpr i32 owner(i32 block) const {
    if constexpr (!kRuns) return of_run.owner(block);
    const i32 number = block / run;
    return number * of_run.num_workers + of_run.owner(block - number * run);
  }
};

// As few workers as leave none with more than its even share, since each makes a part. Where all
// row tiles have as many blocks, a worker has some of them whole, or some workers have one for
// themselves, if that costs no more blocks than merging parts, or one more part, does. even_tiles:
// how many there are; 0: lengths differ.
template <bool kRuns>
constexpr MlaShares<kRuns> mla_shares(i32 blocks, i32 workers, i32 even_tiles) {
  constexpr i32 kMerge = 8, kPart = 3;  // how long that takes, about, in blocks of keys
  const i32 most = max(1, (blocks + workers - 1) / workers);
  if (kRuns && blocks > 0 && even_tiles > 0) {
    const i32 of_tile = blocks / even_tiles;
    const i32 tiles = (most + of_tile - 1) / of_tile;  // of a worker
    if (tiles * of_tile - most <= kMerge) return {blocks, tiles * of_tile, 1};
    const i32 of_one = workers / even_tiles;  // workers for a row tile
    const i32 each = (of_tile - 1) / max(1, of_one) + 1;
    if (of_one > 0 && each - most <= kPart) return {blocks, of_tile, (of_tile + each - 1) / each};
  }
  return {blocks, blocks, (blocks + most - 1) / most};
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
