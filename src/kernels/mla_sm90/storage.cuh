// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of mla_sm90: blocks of keys, P, and what says that they are there. A tile is 64
// rows of 64 columns, of 16 bits, swizzled as wgmma and the copy engine have it.
#pragma once

#include "kernels/common/pipeline_sm90.cuh"
#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/mla_sm90/config.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Where key i of those that a producer gathers lies in its block: so that a thread of the scores,
// which has two columns of every eight, finds all its keys with one warp.
constexpr i32 mla_key(i32 warp, i32 i) { return i / 2 * 8 + 2 * warp + i % 2; }

struct MlaTile {
  u32 base;

  // Address of 8 columns of a row.
  constexpr u32 unit(u32 row, u32 unit) const { return base + row * 128 + ((unit ^ row % 8) << 4); }
  // As 64 rows of an operand, columns from 16 k on.
  constexpr u32 rows(i32 k) const { return ptx::wgmma_descriptor(base, 16) + 2 * k; }
  // This and the three tiles behind it as a transposed B, rows from 16 k on.
  constexpr u32 columns(i32 k, i32 tile_bytes) const {
    return ptx::wgmma_descriptor(base, static_cast<u32>(tile_bytes)) + 128 * k;
  }
};

// What a block has of a row tile: the producer finds out, all others read it.
struct MlaTask {
  i32 kv_head;
  i32 index;  // of the sequence
  i32 first_key;
  i32 num_blocks;  // of keys
  i32 batch;
  i32 q_begin;
  i32 kv_begin;
  i32 first_page;
  SequenceShape shape;
  i32 is_whole;  // no other block has keys of this row tile
  i32 is_first;  // no block has keys before these
  i32 is_last;   // of this block
  Keys seen;     // by some row of the tile; the last member
};

template <MlaSm90Config kConfig>
struct MlaStorage {
  using Config = MlaSm90Config;
  u32 base;

  constexpr MlaTile keys(u32 stage, i32 tile) const {
    return {base + (static_cast<i32>(stage) * (Config::kTiles + 1) + tile) * kConfig.tile_bytes()};
  }
  // Of those that are not in registers.
  constexpr MlaTile q(i32 tile) const {
    return {base + kConfig.q_at() + (tile - kConfig.register_tiles()) * Config::kRowTileBytes};
  }
  constexpr MlaTile p(u32 buffer) const {
    return {base + kConfig.p_at() + buffer * Config::kRowTileBytes};
  }
  // Before the product with P: what a row of O is multiplied by, where a row of its warp is.
  constexpr u32 factor(u32 buffer, i32 row) const {
    return base + kConfig.factors_at() + (static_cast<i32>(buffer) * Config::kRows + row) * 4;
  }
  constexpr u32 grew(u32 buffer, i32 warp) const {
    return base + kConfig.grew_at() + buffer * 16 + warp * 4;
  }
  // MlaRowEnd
  constexpr u32 end(i32 row) const { return base + kConfig.ends_at() + row * 8; }
  constexpr u32 visible(i32 row) const { return base + kConfig.visible_at() + row * 8; }
  constexpr u32 task(u32 count) const {
    return base + kConfig.tasks_at() + count % Config::kTasks * 64;
  }
  // A key of a warp's, as it is in memory.
  constexpr u32 record(i32 warp, u32 buffer, i32 key) const {
    return base + kConfig.records_at() +
           (warp * Config::kRecordBuffers + static_cast<i32>(buffer)) * kConfig.record_bytes() +
           key * Config::kRecordRow;
  }
  // Which of the keys that a warp has gathered are not there: key i of it (mla_key) bit i, and bit
  // 31 if one of them should be, or cannot be told by products.
  constexpr u32 missing(u32 stage, i32 warp) const {
    return base + kConfig.missing_at() + stage * 16 + warp * 4;
  }
  constexpr u32 words() const { return base + kConfig.words_at(); }

  // Producer -> others: a task is there.
  constexpr u32 task_full(u32 count) const {
    return barrier(kConfig.stages() * (Config::kPieces + 2) +
                   static_cast<i32>(count % Config::kTasks));
  }
  // Copy engine -> scores: two tiles have landed; with the last two of values the ninth.
  constexpr u32 full(u32 stage, i32 piece) const {
    return barrier(static_cast<i32>(stage) * Config::kPieces + piece);
  }
  // Values -> producer: half of the values were read.
  constexpr u32 empty(u32 stage, i32 half) const {
    return barrier(kConfig.stages() * Config::kPieces + 2 * static_cast<i32>(stage) + half);
  }
  // Scores -> values: P is there; ends of rows are.
  constexpr u32 p_full(u32 buffer) const { return last_barrier(static_cast<i32>(buffer)); }
  constexpr u32 ends_full() const { return last_barrier(4); }
  // Values -> scores: they were read.
  constexpr u32 p_empty(u32 buffer) const { return last_barrier(2 + static_cast<i32>(buffer)); }
  constexpr u32 ends_empty() const { return last_barrier(5); }

  void init() const {
    for (u32 stage = 0; stage < kConfig.stages(); ++stage) {
      for (i32 piece = 0; piece < Config::kPieces; ++piece) {
        ptx::mbarrier_init(full(stage, piece), kConfig.arrivals());
      }
      for (i32 half = 0; half < 2; ++half) ptx::mbarrier_init(empty(stage, half), 4);
    }
    for (u32 task = 0; task < Config::kTasks; ++task) ptx::mbarrier_init(task_full(task), 1);
    for (u32 buffer = 0; buffer < Config::kPBuffers; ++buffer) {
      ptx::mbarrier_init(p_full(buffer), 4);
      ptx::mbarrier_init(p_empty(buffer), 8);
    }
    ptx::mbarrier_init(ends_full(), 4);
    ptx::mbarrier_init(ends_empty(), 8);
    ptx::fence_mbarrier_init();
  }

  void store_task(u32 count, const MlaTask& x) const {
    const auto words = __builtin_bit_cast(TaskWords, x);
    ptx::store_shared(bad(count), 0);
#pragma unroll
    for (i32 i = 0; i < kTaskWords; ++i) ptx::store_shared(task(count) + i * 4, words.word[i]);
    ptx::mbarrier_arrive(task_full(count));
  }
  MlaTask load_task(u32 count) const {
    ptx::mbarrier_wait(task_full(count), count / Config::kTasks % 2);
    TaskWords words;
#pragma unroll
    for (i32 i = 0; i < kTaskWords; ++i) words.word[i] = ptx::load_shared(task(count) + i * 4);
    return __builtin_bit_cast(MlaTask, words);
  }
  Keys seen(u32 count) const {
    const u32 at = task(count) + static_cast<u32>(sizeof(MlaTask) - sizeof(Keys));
    return {static_cast<i32>(ptx::load_shared(at)), static_cast<i32>(ptx::load_shared(at + 4))};
  }
  // Some key of the task has no page: known with the keys.
  constexpr u32 bad(u32 count) const {
    return base + kConfig.bad_at() + count % Config::kTasks * 4;
  }

 private:
  static constexpr i32 kTaskWords = sizeof(MlaTask) / 4;
  struct TaskWords {
    u32 word[kTaskWords];
  };
  static_assert(sizeof(MlaTask) <= 64);

  constexpr u32 barrier(i32 number) const { return base + kConfig.barriers_at() + number * 8; }
  constexpr u32 last_barrier(i32 number) const {
    return barrier(kConfig.num_barriers() - 6 + number);
  }
};

}  // namespace fulmen
