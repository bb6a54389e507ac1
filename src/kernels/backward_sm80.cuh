// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dQ, dK and dV on the tensor cores of every GPU since Ampere, every option of the library. A block
// owns keys, keeps K and V in shared memory and its dK and dV in registers, and meets Q and dO of
// every head of the group, a tile of queries at a time, loaded one step ahead.
// Source: Dao, FlashAttention-2 (2023), section 3.1.2. A step:
//   1. Q_i, dO_i have arrived; the copies of the next tile are started
//   2. S = Q K^T, P = exp(S - lse)                  a warp has its own tiles of S
//   3. dP = dO V^T, dS = P (dP - D)                 P and dS go to shared memory, for all warps
//   4. dV += P^T dO, dK += dS^T Q                   a warp has its own part of dK and dV
//   5. dQ = dS K                                    added to float32 sums in global memory
// A hidden pair has P = dS = 0, and 0 times NaN is NaN: where a block that is not full meets a
// score or a dP that is not finite, its tiles are marked, and backward_finish_sm80 looks at them.
// Launched with one block for each of num_kv_tiles(), after backward_rows_sm80.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/backward_rows_sm80.cuh"
#include "kernels/tile/backward_gradients_sm80.cuh"
#include "kernels/tile/backward_pairs_sm80.cuh"

namespace fulmen {

// Lines of key/value heads go group by group, so that what they read and dQ stay in the L2; within
// a group the first keys come first, since they are seen by the most rows under a causal mask.
constexpr TileTask key_task(u32 block, u32 lines, u32 heads, u32 slots, u32 lines_per_group) {
  const u32 first = block / (lines_per_group * slots) * lines_per_group;
  const u32 members = min(lines_per_group, lines - first);
  const u32 within = block - first * slots;
  const u32 line = first + within % members;
  return {line / heads, line % heads, within / members};
}

template <Sm80BackwardConfig kConfig>
struct BackwardSm80 {
  using HeadType = Head<kConfig.dtype>;

  const Sm80BackwardParams& params;
  const AttentionParams& p;
  i64 index;  // of the sequence
  KeyPlace place;
  i64 q_slot;  // of the first tile of queries, among num_slots of a head
  i64 num_slots;
  BlockRange range{};
  BackwardTilesSm80<kConfig> tiles;
  BackwardPairsSm80<kConfig> pairs;
  BackwardGradientsSm80<kConfig> gradients;

  BackwardSm80(const Sm80BackwardParams& params_, const HeadType& head, const TilePlace& keys)
      : params(params_),
        p(params_.attention),
        index(keys.index),
        place{head.sequence, head.kv_head, keys.first_row},
        q_slot(p.packed ? first_slot(place.sequence.q_begin, index, kConfig.rows) : 0),
        num_slots(num_tile_slots(p, p.q_rows, kConfig.rows)),
        pairs{p, tiles} {}

  i64 tile_number(i64 head, i64 block) const {
    return row_tile_number(p, place.sequence.batch, head, q_slot + block, num_slots);
  }

  void fetch_keys() const {
    copy_rows<kConfig.columns, kConfig.threads()>(tiles.k_tile(), key_source(p.k, p.dim_qk),
                                                  static_cast<i32>(place.first_key));
    copy_rows<kConfig.columns, kConfig.threads()>(tiles.v_tile(), key_source(p.v, p.dim_v),
                                                  static_cast<i32>(place.first_key));
  }
  RowSource key_source(const ArrayView& array, i64 dims) const {
    return {array, array.offset(place.sequence.batch, place.kv_head, place.sequence.kv_begin, 0),
            place.sequence.shape.kv_len, dims};
  }

  void fetch(i64 head, i64 block, i32 stage) const {
    const auto source = [&](const ArrayView& array, i64 dims) {
      return RowSource(array, array.offset(place.sequence.batch, head, place.sequence.q_begin, 0),
                       place.sequence.shape.q_len, dims);
    };
    const i32 first = static_cast<i32>(block * kConfig.rows);
    copy_rows<kConfig.rows, kConfig.threads()>(tiles.q_tile(stage), source(p.q, p.dim_qk), first);
    copy_rows<kConfig.rows, kConfig.threads()>(tiles.dout_tile(stage), source(p.dout, p.dim_v),
                                               first);
    ptx::cp_async_commit();
  }

  // What is kept of the rows, which has one place only.
  void fetch_rows(i64 head, i64 block) const {
    const u8* const rows =
        reinterpret_cast<const u8*>(params.rows + tile_number(head, block) * kConfig.rows);
#pragma unroll
    for (i32 at = 0; at < kConfig.rows; at += kConfig.threads()) {
      const i32 r = at + static_cast<i32>(ptx::thread_index());
      if (r < kConfig.rows) ptx::cp_async_16(tiles.rows_at() + r * 16, rows + r * 16, true);
    }
    ptx::cp_async_commit();
  }

  // How many blocks of keys before this one add to a tile of queries.
  u32 turn_of(i64 block) const {
    const i64 own = place.first_key / kConfig.columns;
    i64 low = 0, high = own;
    while (low < high) {  // the first that does; from there to this one all do
      const i64 middle = (low + high) / 2;
      if (visited_by(middle * kConfig.columns).visit.end > block) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return static_cast<u32>(own - low);
  }

  BlockRange visited_by(i64 key) const {
    const SequenceShape& shape = place.sequence.shape;
    const i64 end = key + kConfig.columns;
    BlockRange found =
        visible_row_blocks(p.mask_options, shape, {key, min<i64>(end, shape.kv_len)}, kConfig.rows);
    if (end > shape.kv_len) found.full = {0, 0};  // no row sees the keys past the end
    return found;
  }

  void add_dq_of(i64 head, i64 block) const {
    const i64 number = tile_number(head, block);
    if constexpr (kConfig.ordered) {
      if (ptx::thread_index() == 0) ptx::await(params.turns + number, turn_of(block));
      ptx::block_sync();  // it is this block's turn
    }
    gradients.add_dq(params.dq_sums + number * kConfig.dq_elems());
    if constexpr (kConfig.ordered) {
      ptx::block_sync();  // all have added
      if (ptx::thread_index() == 0) ptx::announce(params.turns + number);
    }
  }

  // Steps 2 to 5 for a tile of queries; the rows of the next one are fetched once these are read.
  template <class FetchRows>
  void step(const HeadType& head, i64 block, i32 stage, const FetchRows& fetch_next_rows) {
    const bool is_full = kConfig.full_blocks && range.is_full(block);
#pragma unroll 1
    for (i32 tile = tiles.warp; tile < kConfig.s_tiles(); tile += kConfig.warps) {
      pairs.compute(head, block, place.first_key, is_full, stage, tile);
    }
    ptx::block_sync();  // P and dS are there; all are done with the rows
    fetch_next_rows();
    if (pairs.suspect) params.suspect_rows[tile_number(head.head, block)] = 1;
    if constexpr (kConfig.dv) {
      gradients.template add_columns<kConfig.dv_dims()>(gradients.dV, tiles.p_tile(),
                                                        tiles.dout_tile(stage));
    }
    if constexpr (kConfig.dk) {
      gradients.template add_columns<kConfig.dk_dims()>(gradients.dK, tiles.ds_tile(),
                                                        tiles.q_tile(stage));
    }
    if constexpr (kConfig.dq) add_dq_of(head.head, block);
  }

  // Step 1, and all tiles of queries of all heads of the group that see a key of the block.
  void walk() {
    const i64 begin = range.visit.begin, end = range.visit.end;
    const i64 group = p.group_size();
    const i64 first_head = place.kv_head * group;
    fetch_keys();
    fetch(first_head, begin, 0);
    fetch_rows(first_head, begin);
    i32 stage = 0;
#pragma unroll 1
    for (i64 member = 0; member < group; ++member) {
      const HeadType head(p, index, first_head + member);
#pragma unroll 1
      for (i64 block = begin; block < end; ++block) {
        const bool wraps = block + 1 == end;
        const bool is_last = wraps && member + 1 == group;
        const i64 next_head = head.head + (wraps ? 1 : 0);
        const i64 next_block = wraps ? begin : block + 1;
        ptx::cp_async_wait<0>();
        ptx::block_sync();  // tiles are there; all are done with those of the step before
        if (kConfig.stages > 1 && !is_last) fetch(next_head, next_block, 1 - stage);
        step(head, block, stage, [&] {
          if (!is_last) fetch_rows(next_head, next_block);
        });
        if constexpr (kConfig.stages > 1) {
          stage = 1 - stage;
        } else {
          ptx::block_sync();  // all are done with Q and dO
          if (!is_last) fetch(next_head, next_block, 0);
        }
      }
    }
  }

  void run() {
    if (place.first_key < place.sequence.shape.kv_len) {
      range = visited_by(place.first_key);
      if (range.visit.size() > 0) walk();
    }
    const float kept_scale = kConfig.dropout ? static_cast<float>(p.dropout.kept_scale()) : 1.f;
    if constexpr (kConfig.dk) {
      gradients.template store<kConfig.dk_dims()>(gradients.dK, place, p.dk, p.dim_qk,
                                                  static_cast<float>(p.score_map.scale));
    }
    if constexpr (kConfig.dv) {
      gradients.template store<kConfig.dv_dims()>(gradients.dV, place, p.dv, p.dim_v, kept_scale);
    }
  }
};

template <Sm80BackwardConfig kConfig>
void backward_sm80(const Sm80BackwardParams& params) {
  const AttentionParams& p = params.attention;
  u32 block = ptx::block_index();
  if constexpr (kConfig.ordered) {  // in the order in which blocks start, so that none waits for
                                    // one that has not
    const u32 word = ptx::dynamic_shared();
    if (ptx::thread_index() == 0) ptx::store_shared(word, ptx::atomic_add(params.next_block, 1));
    ptx::block_sync();  // the number is there
    block = ptx::load_shared(word);
    ptx::block_sync();  // and read
  }
  const i64 num_slots = num_tile_slots(p, p.kv_rows, kConfig.columns);
  const TileTask task =
      key_task(block, static_cast<u32>(p.batch_extent() * p.heads_kv), static_cast<u32>(p.heads_kv),
               static_cast<u32>(num_slots), static_cast<u32>(params.lines_per_group));
  const TilePlace place = find_tile(p, p.cu_kv, task, kConfig.columns);
  const Head<kConfig.dtype> head(p, place.index, task.head * p.group_size());
  if (place.first_row < 0 || place.first_row >= head.sequence.kv_slot) return;
  BackwardSm80<kConfig> keys(params, head, place);
  keys.run();
  if (keys.pairs.suspect) {
    params.suspect_keys[(task.batch * p.heads_kv + task.head) * num_slots + task.slot] = 1;
  }
}

}  // namespace fulmen
