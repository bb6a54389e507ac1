// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention over a latent cache on Hopper (multi-head latent attention: DeepSeek-V2, 2024): one
// head of keys of 576 numbers, whose first 512 are the values, for all query heads. Rows of all
// heads and query positions are the rows of a tile; a fixed grid divides the blocks of keys of all
// sequences evenly (decode_sm80/scheduler.cuh). Warps copy each key once, for both products; one
// warpgroup makes scores and weights (scores.cuh), two sum values, each half of the dims
// (values.cuh). combine_mla adds up what several blocks have of one row tile.
// Must hold: sm_90a, launched with threads() threads and shared_bytes() bytes.
#pragma once

#include "kernels/decode_sm80/empty_rows.cuh"
#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/mla_sm90/epilogue.cuh"
#include "kernels/mla_sm90/gatherer.cuh"
#include "kernels/mla_sm90/scores.cuh"
#include "kernels/mla_sm90/values.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct MlaSm90 {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  using Cursor = KeyCursor<kSchedule>;
  using Counts = KeyCounts<kSchedule, MlaSm90Config::threads()>;

  const MlaSm90Arguments& arguments;
  const AttentionParams& p = arguments.attention;
  MlaStorage<kConfig> shared{ptx::dynamic_shared()};
  i32 row_tile = static_cast<i32>(ptx::block_index()) % arguments.row_tiles;
  i32 worker = static_cast<i32>(ptx::block_index()) / arguments.row_tiles;
  i32 workers = static_cast<i32>(ptx::num_blocks()) / arguments.row_tiles;
  QueryRows rows = query_rows_of<kConfig>(arguments, row_tile);
  Counts counts{p, rows, shared.words()};

  void run() {
    if (ptx::thread_index() == 0) {
      if constexpr (!kConfig.gathers) ptx::prefetch_tensormap(arguments.kv);
      shared.init();
    }
    ptx::block_sync();
    ptx::grid_dependents_launch();
    const MlaShares<kConfig.several> shares = mla_shares_of<kConfig>(counts, p, workers);
    clear_empty();
    if (worker < shares.num_workers() && shares.num_chunks > 0) attend(shares);
  }

 private:
  void attend(const MlaShares<kConfig.several>& shares) {
    const i32 of_head = counts.of_head();
    const i32 begin = shares.begin(worker);
    Cursor cursor{&p, rows, {}, begin / of_head, 0, 0, {}, {}};
    const i32 tile_begin = begin - begin % of_head + counts.seek(cursor, begin % of_head);
    const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
    if (warpgroup == 3) {
      ptx::setmaxnreg_dec<kConfig.producer_registers()>();
      const i32 piece = ptx::broadcast(ptx::thread_index() / 32 % 4);
      if constexpr (kConfig.gathers) {
        const MlaProducer<kConfig> producer{arguments, shared, 0, shares, worker, piece};
        MlaGatherer<kConfig>{producer}.run(cursor, tile_begin);
        return;
      }
      const i32 box_rows = kSchedule.paged ? key_box_rows(p, kConfig.keys()) : kConfig.keys();
      MlaProducer<kConfig>{arguments, shared, box_rows, shares, worker, piece}.run(cursor,
                                                                                   tile_begin);
    } else if (warpgroup == 2) {
      ptx::setmaxnreg_inc<kConfig.score_registers()>();
      MlaScores<kConfig>{arguments, shared, row_tile, worker, ptx::thread_index() % 128}.run();
    } else {
      ptx::setmaxnreg_inc<MlaSm90Config::value_registers()>();
      MlaValues<kConfig>{arguments, shared, row_tile, worker, warpgroup, ptx::thread_index() % 128}
          .run();
    }
  }

  void clear_empty() const {
    constexpr i32 kWarps = MlaSm90Config::threads() / 32;
    const EmptyRows<kSchedule> empty{p, arguments.unit, arguments.group, row_tile};
    if (counts.has_empty()) empty.clear_sequences(counts, worker, workers, kWarps);
    if (p.packed.q && row_tile == 0 && worker == 0) empty.clear_rest();
  }
};

template <MlaSm90Config kConfig>
void mla_sm90(const MlaSm90Arguments& arguments) {
  MlaSm90<kConfig>{arguments}.run();
}

}  // namespace fulmen
