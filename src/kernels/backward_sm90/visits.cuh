// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of queries a block of keys has to visit in the Hopper backward where documents hide
// pairs: from the first to the last that may hold one of its documents. A warp looks at one block
// of keys. Part of backward_prepare_sm90, after document_ranges_sm90 has looked at the queries.
#pragma once

#include "kernels/backward_sm90/config.h"
#include "kernels/common/id_ranges.cuh"

namespace fulmen {

struct BackwardVisits {
  const BackwardPrepareParams& params;
  u32 lane;

  // Of keys [first, first + count) of a sequence.
  IdRange ids(const Sequence& sequence, i32 first, i32 count) const {
    const i32 begin = i32(sequence.kv_begin) + first;
    const i32 end = i32(sequence.kv_begin) + min(first + count, sequence.shape.kv_len);
    return ids_of_rows(params.attention.kv_ids, sequence.batch, begin, end, lane);
  }

  // Of keys from `first` on, by blocks of all of the sequence's queries.
  BackwardVisit visit(const Sequence& sequence, i64 index, i32 first) const {
    const AttentionParams& p = params.attention;
    const IdRange* const queries =
        params.query_ranges +
        first_range(p.packed, p.q_rows, params.q_rows, index, sequence.q_begin);
    const IdRange all = ids(sequence, first, params.kv_rows);
    const auto meets = [&](i32 i) { return queries[i].meets(all); };
    Interval blocks{0, ceil_div(sequence.shape.q_len, params.q_rows)};
    blocks.end = find_block<true>(blocks, lane, meets) + 1;
    blocks.begin = find_block<false>(blocks, lane, meets);
    BackwardVisit visit{i32(blocks.begin), i32(blocks.end), {}, {}};
#pragma unroll
    for (i32 warpgroup = 0; warpgroup < 2; ++warpgroup) {
      const IdRange own = ids(sequence, first + warpgroup * (params.kv_rows - 64), 64);
      const auto is_one = [&](i32 i) { return queries[i].is_one_with(own); };
      Interval full = blocks;
      full.begin = find_block<false>(full, lane, is_one);
      full.end = find_block<false>(full, lane, [&](i32 i) { return !is_one(i); });
      visit.full_begin[warpgroup] = i32(full.begin);
      visit.full_end[warpgroup] = i32(full.end);
    }
    return visit;
  }

  // By all warps of the grid. sequence_at(index): number `index` of the sequences.
  template <class SequenceAt>
  void run(u32 warp, u32 warps, const SequenceAt& sequence_at) const {
    const AttentionParams& p = params.attention;
    const i64 count = num_key_ranges(p.kv_rows, p.num_sequences, p.packed, params.kv_rows);
    for (i64 number = warp; number < count; number += warps) {
      const i64 index = sequence_of_key_range(p, params.kv_rows, number);
      const Sequence sequence = sequence_at(index);
      const i64 block = number - first_key_range(p, params.kv_rows, index, sequence.kv_begin);
      const i64 first = block * params.kv_rows;
      if (first < 0 || first >= sequence.shape.kv_len) continue;
      const BackwardVisit found = visit(sequence, index, i32(first));
      if (lane == 0) params.visits[number] = found;
    }
  }
};

}  // namespace fulmen
