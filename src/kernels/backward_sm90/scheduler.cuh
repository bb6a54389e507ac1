// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tile scheduler of backward_sm90. A work tile is one block of keys of one key/value head of
// one batch entry, with the query heads that share it. Heads form groups; a group is finished
// before the next one starts, so that its sums of dQ stay in the L2 cache. Inside a group the first
// block of keys of every head comes first: under a causal mask it has the most queries; the last
// group may be larger, so that short work loads are left for the end. In deterministic mode the
// last block of keys of a head comes first: no other block of the head sees its first queries, so
// it never waits, and it stays ahead of the blocks after it. With sequences of different lengths a
// group is heads of one sequence, and a sequence without keys has one empty work tile, which
// converts its dQ. Plain integers, shared by the kernel's roles and the tests.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/backward_sm90/config_beside.h"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/tile_lists/config.h"

namespace fulmen {

struct BackwardTile {
  i32 batch_kv_head;
  i32 kv_block;
  i32 num_kv_blocks;  // of the sequence
  i32 q_begin;        // of its sequence
  i32 kv_begin;
  SequenceShape shape;
  i32 part = 0;  // of its queries, in a split tile
};

// First key of a warpgroup in its work tile.
template <BackwardSm90Config kConfig>
inline i32 first_key(u32 warpgroup) {
  if constexpr (kConfig.paired) return 64 * i32(ptx::cluster_rank());
  return kConfig.divides_products() ? 0 : 64 * i32(warpgroup);
}

template <BackwardSm90Config kConfig>
inline i32 num_whole_tiles(const BackwardParams& params) {
  if constexpr (kConfig.score.varlen)
    return params.key_block_infos[0].all_kv_blocks * params.heads_kv;
  return params.num_batch_kv_heads() * (params.num_kv_blocks / kConfig.tiles_of_claim());
}

// Number `index` of the work tiles of kv heads first_head .. first_head + heads - 1.
constexpr BackwardTile tile_of_heads(const BackwardParams& params, i32 index, i32 first_head,
                                     i32 heads, i32 num_kv_blocks) {
  const i32 before_last = heads - params.last_heads;
  i32 first = before_last, count = params.last_heads;
  if (index < before_last * num_kv_blocks) {
    first = index / (params.heads_per_group * num_kv_blocks) * params.heads_per_group;
    count = min(params.heads_per_group, before_last - first);
  }
  const i32 within = index - first * num_kv_blocks;
  const i32 rank = within / count;
  return {first_head + first + within - rank * count, rank, num_kv_blocks, 0, 0, params.shape};
}

template <BackwardSm90Config kConfig>
inline BackwardTile whole_tile_at(const BackwardParams& params, i32 index) {
  if constexpr (!kConfig.score.varlen) {
    BackwardTile work_tile = tile_of_heads(params, index, 0, params.num_batch_kv_heads(),
                                           params.num_kv_blocks / kConfig.tiles_of_claim());
    if constexpr (kConfig.shares_loads) {
      work_tile.kv_block = 2 * work_tile.kv_block + i32(ptx::cluster_rank());
      work_tile.num_kv_blocks = params.num_kv_blocks;
    }
    if (kConfig.deterministic)
      work_tile.kv_block = work_tile.num_kv_blocks - 1 - work_tile.kv_block;
    return work_tile;
  } else {
    const KeyBlockInfo place = params.key_block_infos[index / params.heads_kv];
    BackwardTile work_tile =
        tile_of_heads(params, index - place.first_block * params.heads_kv,
                      place.sequence * params.heads_kv, params.heads_kv, place.num_kv_blocks);
    work_tile.q_begin = place.q_begin;
    work_tile.kv_begin = place.kv_begin;
    work_tile.shape = place.shape;
    return work_tile;
  }
}

// Indices of the grid's counter: whole work tiles, parts of the split ones, which are the last, and
// then only conversions of dQ.
struct BackwardTileCount {
  i32 whole;
  i32 split;
  i32 parts;  // of each
  i32 lag;

  constexpr i32 of_tiles() const { return whole + split * parts; }
  constexpr i32 all() const { return of_tiles() + split + lag; }

  // The work tile whose dQ index `index` converts; negative: none. Parts convert nothing, so that
  // no part waits for parts with a higher index.
  constexpr i32 converted(i32 index) const {
    if (index < whole) return index - lag;
    return index < of_tiles() ? -1 : index - of_tiles() + whole - lag;
  }
};

template <BackwardSm90Config kConfig>
inline BackwardTileCount backward_tile_count(const BackwardParams& params) {
  const i32 tiles = num_whole_tiles<kConfig>(params);
  if constexpr (!kConfig.splits()) return {tiles, 0, 0, params.lag};
  return {tiles - params.num_split, params.num_split, params.num_parts, params.lag};
}

template <BackwardSm90Config kConfig>
inline BackwardTile tile_at(const BackwardParams& params, const BackwardTileCount& count,
                            i32 index) {
  if (!kConfig.splits() || index < count.whole) return whole_tile_at<kConfig>(params, index);
  const i32 number = (index - count.whole) / count.parts;
  BackwardTile work_tile = whole_tile_at<kConfig>(params, count.whole + number);
  work_tile.part = index - count.whole - number * count.parts;
  return work_tile;
}

// Number of a work tile among the split ones; negative: it is whole.
template <BackwardSm90Config kConfig>
constexpr i32 split_number(const BackwardParams& params, const BackwardTile& work_tile) {
  if constexpr (!kConfig.splits()) return -1;
  constexpr i32 kTiles = kConfig.tiles_of_claim();
  const i32 from_end =
      (params.num_batch_kv_heads() - work_tile.batch_kv_head) * (work_tile.num_kv_blocks / kTiles) -
      work_tile.kv_block / kTiles;
  const i32 number = params.num_split - from_end;
  return number < 0 ? number : kTiles * number + work_tile.kv_block % kTiles;
}

// How often blocks announce that their share of a work tile's dQ has arrived, of all work tiles
// whose dQ goes to its kv head.
template <BackwardSm90Config kConfig>
constexpr i32 tiles_of_head(const BackwardParams& params, const BackwardTile& work_tile) {
  const i32 claims = work_tile.num_kv_blocks / kConfig.tiles_of_claim();
  if constexpr (!kConfig.splits()) return claims * kConfig.cluster_blocks();
  const i32 behind = (params.num_batch_kv_heads() - 1 - work_tile.batch_kv_head) * claims;
  const i32 split = min(max(params.num_split - behind, 0), claims);
  return (claims + split * (params.num_parts - 1)) * kConfig.cluster_blocks();
}

// The entry of the arrays' batch axis.
template <BackwardSm90Config kConfig>
constexpr i32 batch_of(const BackwardParams& params, i32 batch_kv_head) {
  return kConfig.score.varlen && params.attention.packed.kv ? 0 : batch_kv_head / params.heads_kv;
}

// The first row of the kv head's first query head in lse_log2 and delta; that of the next head lies
// padded_rows_per_head further.
template <BackwardSm90Config kConfig>
constexpr i64 first_padded_row(const BackwardParams& params, i32 batch_kv_head, i32 q_begin) {
  const i32 sequence = batch_kv_head / params.heads_kv;
  const i32 head = (batch_kv_head - sequence * params.heads_kv) * params.group_size;
  const i64 q_head = i64{batch_of<kConfig>(params, batch_kv_head)} * params.heads_q + head;
  return q_head * params.padded_rows_per_head +
         padded_row(kConfig.score.varlen && params.attention.packed.q, sequence, q_begin);
}

// Blocks of queries that see keys [begin, begin + count).
template <BackwardSm90Config kConfig>
constexpr BlockRange query_blocks_of_keys(const IntervalMask& mask, const SequenceShape& shape,
                                          i64 begin, i64 count) {
  const Interval keys{begin, min<i64>(begin + count, shape.kv_len)};
  if (keys.size() <= 0) return {{0, 0}, {0, 0}};
  return visible_row_blocks(effective_mask<kConfig>(mask), shape, keys, kConfig.q_rows);
}

// In deterministic mode: how many blocks of keys add to dQ of a block of queries before `kv_block`:
// the ones after it that the last of the queries sees.
template <BackwardSm90Config kConfig>
constexpr u32 arrivals_before(const BackwardParams& params, i32 q_block, i32 kv_block) {
  const i64 last = min((q_block + 1) * kConfig.q_rows, params.shape.q_len) - 1;
  const IntervalMask mask = effective_mask<kConfig>(params.mask);
  const i64 end = visible_columns(mask, params.shape, last).end;
  return u32(ceil_div(end, kConfig.kv_rows())) - 1 - u32(kv_block);
}

// The steps of a work tile: all blocks of queries of all its query heads that see its keys.
// `staggered` rotates them, so that blocks of keys do not add to the same rows of dQ at the same
// time.
struct QueryBlockRange {
  i32 begin;
  i32 count;  // blocks of queries of a head
  i32 rotation;
  i32 heads;
  i32 first = 0;  // step, in a split tile
  i32 num_steps = count * heads;

  constexpr i32 end() const { return begin + count; }
};

template <BackwardSm90Config kConfig>
constexpr QueryBlockRange query_block_range(const BackwardParams& params,
                                            const SequenceShape& shape, i32 kv_block) {
  // Of what the blocks of a claim see.
  constexpr i32 kTiles = kConfig.tiles_of_claim(), kRows = kTiles * kConfig.kv_rows();
  const Interval visible =
      query_blocks_of_keys<kConfig>(params.mask, shape, i64{kv_block / kTiles} * kRows, kRows)
          .visible;
  QueryBlockRange range{i32(visible.begin), i32(visible.size()), 0, params.group_size};
  if (kConfig.staggered && kConfig.score.mask_kind == MaskKind::kNone && range.count > 0) {
    range.rotation = kv_block / kTiles * (kRows / kConfig.q_rows) % range.count;
  }
  return range;
}

// The blocks of queries that documents leave.
template <BackwardSm90Config kConfig>
constexpr const DocumentBlocks& document_blocks_of(const BackwardParams& params,
                                                   const BackwardTile& work_tile) {
  const i64 first = first_key_range(params.attention, kConfig.kv_rows(),
                                    work_tile.batch_kv_head / params.heads_kv, work_tile.kv_begin);
  return params.document_blocks[first + work_tile.kv_block];
}

// What lists of tiles leave to a work tile, head by head.
template <BackwardSm90Config kConfig>
struct ListedQueries {
  using Line = TileLine<kConfig.kv_rows() / kPartRows, kConfig.score.mask_tiles>;

  const BackwardParams& params;
  const BackwardTile& work_tile;

  // Of a query head among those of the kv head.
  Line line(i32 head) const {
    const i32 index = work_tile.batch_kv_head / params.heads_kv;
    const i32 first = (work_tile.batch_kv_head - index * params.heads_kv) * params.group_size;
    const TileLists& lists = params.tile_lists;
    return Line(lists, lists.line_number(index, first + head, params.heads_q, work_tile.kv_block));
  }

  // Steps of all heads.
  i32 count(const QueryBlockRange& range) const {
    i32 steps = 0;
    for (i32 head = 0; head < range.heads && range.count > 0; ++head) {
      const Line own = line(head);
#pragma unroll 4
      for (i32 group = range.begin / 32; 32 * group < range.end(); ++group) {
        steps += ptx::count_ones(own.met(group, range.begin, range.end()));
      }
    }
    return steps;
  }
};

// The same of a work tile or a part of one.
template <BackwardSm90Config kConfig>
constexpr QueryBlockRange query_block_range(const BackwardParams& params,
                                            const BackwardTile& work_tile) {
  QueryBlockRange range = query_block_range<kConfig>(params, work_tile.shape, work_tile.kv_block);
  if constexpr (kConfig.score.documents) {
    if (range.count <= 0) return range;
    const DocumentBlocks& documents = document_blocks_of<kConfig>(params, work_tile);
    const i32 end = min(range.begin + range.count, documents.end);
    range.begin = max(range.begin, documents.begin);
    range.count = max(end - range.begin, 0);
    range.rotation = 0;
    range.num_steps = range.count * range.heads;
  }
  if constexpr (kConfig.score.has_tile_lists()) {
    range.rotation = 0;
    range.num_steps = ListedQueries<kConfig>{params, work_tile}.count(range);
  }
  if (split_number<kConfig>(params, work_tile) < 0) return range;
  range.first = range.num_steps * work_tile.part / params.num_parts;
  range.num_steps = range.num_steps * (work_tile.part + 1) / params.num_parts - range.first;
  return range;
}

// One step of a range.
struct BackwardStep {
  i32 head = 0;  // among those of the kv head
  i32 q_block;
  i32 left;  // blocks of queries of the head, with this one

  explicit constexpr BackwardStep(const QueryBlockRange& range)
      : q_block(range.begin + range.rotation), left(range.count) {
    if (range.first == 0) return;
    head = range.first / range.count;
    const i32 done = range.first - head * range.count;
    left -= done;
    q_block += done;
    if (q_block >= range.begin + range.count) q_block -= range.count;
  }
  constexpr void advance(const QueryBlockRange& range) {
    if (++q_block == range.begin + range.count) q_block = range.begin;
    if (--left > 0) return;
    left = range.count;
    ++head;
  }
};

// One step of those that lists of tiles leave.
template <BackwardSm90Config kConfig>
struct ListedStep {
  using Queries = ListedQueries<kConfig>;

  Queries queries;
  i32 head = 0;
  i32 q_block = 0;
  typename Queries::Line line;
  i32 group;
  u32 left = 0;  // of the group, without this one

  ListedStep(const Queries& queries_, const QueryBlockRange& range)
      : queries(queries_), line(queries.line(0)), group(range.begin / 32 - 1) {
    if (range.num_steps > 0) advance(range);
  }
  // To the next, where there is one.
  void advance(const QueryBlockRange& range) {
#pragma unroll 1
    while (left == 0) {
      if (32 * ++group >= range.end()) {
        if (++head >= range.heads) return;
        line = queries.line(head);
        group = range.begin / 32;
      }
      left = line.met(group, range.begin, range.end());
    }
    q_block = 32 * group + ptx::count_ones((left & (0 - left)) - 1);  // the lowest bit
    left &= left - 1;
  }
};

// The first of a range's steps.
template <BackwardSm90Config kConfig>
inline auto first_step(const BackwardParams& params, const BackwardTile& work_tile,
                       const QueryBlockRange& range) {
  if constexpr (kConfig.score.has_tile_lists()) {
    return ListedStep<kConfig>({params, work_tile}, range);
  } else {
    return BackwardStep(range);
  }
}

// The blocks of queries that share a document with each block of keys (DocumentBlocks), which
// backward_preprocess_sm90 leaves for backward_sm90.
struct FindDocumentBlocks {
  const BackwardPreprocessParams& params;
  u32 lane;

  // Of keys [first, first + count) of a sequence.
  IdRange ids(const Sequence& sequence, i32 first, i32 count) const {
    const i32 begin = i32(sequence.kv_begin) + first;
    const i32 end = i32(sequence.kv_begin) + min(first + count, sequence.shape.kv_len);
    return ids_of_rows(params.attention.kv_ids, sequence.batch, begin, end, lane);
  }

  // Of keys from `first` on, by blocks of all of the sequence's queries.
  DocumentBlocks blocks_of(const Sequence& sequence, i64 index, i32 first) const {
    const AttentionParams& p = params.attention;
    const IdRange* const queries =
        params.query_ranges +
        first_range(p.packed.q, p.q_rows, params.q_rows, index, sequence.q_begin);
    const IdRange all = ids(sequence, first, params.kv_rows);
    const auto meets = [&](i32 i) { return queries[i].meets(all); };
    Interval blocks{0, ceil_div(sequence.shape.q_len, params.q_rows)};
    blocks.end = find_block<true>(blocks, lane, meets) + 1;
    blocks.begin = find_block<false>(blocks, lane, meets);
    DocumentBlocks found{i32(blocks.begin), i32(blocks.end), {}, {}};
#pragma unroll
    for (i32 warpgroup = 0; warpgroup < 2; ++warpgroup) {
      const IdRange own = ids(sequence, first + warpgroup * (params.kv_rows - 64), 64);
      const auto is_one = [&](i32 i) { return queries[i].is_one_with(own); };
      Interval full = blocks;
      full.begin = find_block<false>(full, lane, is_one);
      full.end = find_block<false>(full, lane, [&](i32 i) { return !is_one(i); });
      found.full_begin[warpgroup] = i32(full.begin);
      found.full_end[warpgroup] = i32(full.end);
    }
    return found;
  }

  // By all warps of the grid. sequence_at(index): number `index` of the sequences.
  template <class SequenceAt>
  void run(u32 warp, u32 warps, const SequenceAt& sequence_at) const {
    const AttentionParams& p = params.attention;
    const i64 count = num_key_ranges(p.kv_rows, p.num_sequences, p.packed.kv, params.kv_rows);
    for (i64 number = warp; number < count; number += warps) {
      const i64 index = sequence_of_key_range(p, params.kv_rows, number);
      const Sequence sequence = sequence_at(index);
      const i64 block = number - first_key_range(p, params.kv_rows, index, sequence.kv_begin);
      const i64 first = block * params.kv_rows;
      if (first < 0 || first >= sequence.shape.kv_len) continue;
      const DocumentBlocks found = blocks_of(sequence, index, i32(first));
      if (lane == 0) params.document_blocks[number] = found;
    }
  }
};

}  // namespace fulmen
