// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producer of mla_sm90 where keys are gathered: the way of MlaProducer::run, but that a warp
// has keys of its own of every block, and what it asked for last is handed over later.
#pragma once

#include "kernels/mla_sm90/producer.cuh"
#include "kernels/mla_sm90/records.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct MlaGatherer {
  const MlaProducer<kConfig>& producer;

  auto loader() const {
    const MlaKeyFinder<kConfig> finder{producer.arguments};
    if constexpr (kConfig.record != 0) {
      return MlaRecords<kConfig>{finder, producer.shared, producer.piece};
    } else {
      return MlaRows<kConfig>{finder, producer.shared, producer.piece};
    }
  }

  void run(KeyCursor<kConfig.schedule>& cursor, i32 tile_begin) const {
    const MlaShares<kConfig.several>& shares = producer.shares;
    u32 count = 0;  // of row tiles
    PipelineState<kConfig.stages()> at;
    i32 left = shares.begin(producer.worker + 1) - shares.begin(producer.worker);
    producer.begin_task(cursor, tile_begin, left, count);
    auto keys = loader();
    auto next = keys.look_up(cursor);
    i32 kv_head = cursor.kv_head;
#pragma unroll 1
    for (; left > 0; --left) {
      const auto entry = next;
      const i32 own_head = kv_head;
      if (left > 1) {
        if (++cursor.block == cursor.blocks.count) {
          tile_begin += cursor.blocks.num_chunks();
          cursor.next_tile();
          producer.begin_task(cursor, tile_begin, left - 1, ++count);
          kv_head = cursor.kv_head;
        }
        next = keys.look_up(cursor);
      }
      keys.load(entry, own_head, at);
      at.advance();
    }
    keys.finish();
  }
};

}  // namespace fulmen
