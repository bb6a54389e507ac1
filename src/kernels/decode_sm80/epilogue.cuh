// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What becomes of the splits' results at the end of a row tile: together, and with those of other
// blocks of a cluster, they are its result, or a part of it, which goes to the workspace. The block
// that brings the last part adds all of them, in the order of their keys, so that equal calls give
// equal bits.
#pragma once

#include "kernels/decode_sm80/consumer.cuh"
#include "kernels/decode_sm80/operands.cuh"
#include "kernels/decode_sm80/result.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Numbers of the parts of a row tile, and of this block's: those of workers, or of chunks of keys.
// brought: how many the block has brought, with its last one.
struct DecodeParts {
  i32 own;
  i32 first;
  i32 last;
  i32 brought = 1;

  constexpr u32 count() const { return static_cast<u32>(last - first + 1); }
};

template <DecodeSm80Config kConfig>
struct DecodeEpilogueSm80 {
  static constexpr i32 kRows = kConfig.rows();
  static constexpr bool kInCluster = kConfig.cluster > 1;

  const DecodeSm80Params& params;
  u32 shared;
  i32 row_tile;
  u32 parity = 0;  // of the exchange in the cluster

  // Before all else.
  void join_cluster() const {
    if constexpr (!kInCluster) return;
    if (ptx::thread_index() == 0) {
      ptx::mbarrier_init(arrived(), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::warp_sync();
    ptx::cluster_arrive_relaxed();
  }

  // Readies the counters of the row tiles that parts of this block may belong to: this one, and
  // that which begins here.
  void start(const DecodeParts& parts) const {
    if (ptx::thread_index() != 0) return;
    ptx::start_counter(counter_of(parts.first), params.stamp);
    if (!kConfig.has_chunks()) ptx::start_counter(counter_of(parts.own), params.stamp);
  }

  // All warps of the block.
  void leave(DecodeConsumerSm80<kConfig>& consumer, const RowTile<kConfig>& tile,
             const DecodeParts& parts) {
    if constexpr (kInCluster) ptx::cluster_wait();  // release() of all blocks
    exchange(consumer, tile.num_rows());
    if constexpr (kInCluster) exchange_in_cluster(tile);
    const StoreRowTile<kConfig> result{tile};
    if constexpr (kConfig.whole) {
      return for_each_own_quad(
          tile, [&](i32 row, i32 quad) { result.store(row, quad, own(tile, row, quad)); });
    }
    const bool is_whole = parts.first == parts.last;
    if (!is_whole) store_part(tile, parts);
    if (is_whole || (parts.brought > 0 && arrives_last(parts))) {
      for_each_own_quads<kTogether>(tile, [&](const Quads& quads) {
        DecodePartial totals[kTogether];
        if (!is_whole) add_parts(totals, quads, parts);
#pragma unroll
        for (i32 q = 0; q < kTogether; ++q) {
          const auto& [row, quad, is_there] = quads[q];
          const DecodePartial x = is_whole ? own(tile, row, quad) : totals[q];
          result.store(quads[q].stored_row(), quad, x);
        }
      });
    }
  }

  // Before the next row tile: O, maxima and sums were read. In a cluster its blocks wait for that
  // before they exchange the next; Q of a warpgroup takes the place of O at once.
  void release() const {
    if constexpr (kInCluster) ptx::cluster_arrive();
    if constexpr (!kInCluster || kConfig.in_warpgroups()) ptx::block_sync();
  }

 private:
  // Of a row tile: a row, and four dims of it. Of lanes behind the last it is the last again, and
  // is not to be stored.
  struct Quad {
    i32 row;
    i32 number;
    bool is_there;

    constexpr i32 stored_row() const { return is_there ? row : kRows; }
  };
  // Quads that a thread adds up at the same time, and parts of each that it reads: so many loads
  // are under way, of few parts too where there are many rows.
  static constexpr i32 kTogether = kRows > 16 ? 4 : 1;
  static constexpr i32 kAtOnce = 16 / kTogether;
  using Quads = Quad[kTogether];

  // Of all row tiles.
  i64 index_of(i32 part) const { return i64{part} * params.row_tiles + row_tile; }
  // Blocks of a cluster count the parts of their own slices.
  u64* counter_of(i32 part) const {
    return params.counters + index_of(part) * kConfig.cluster + cluster_rank<kConfig>();
  }
  // A worker may leave the first part of one row tile and a later one of another.
  float* part_of(i32 part, bool is_first) const {
    const i64 index = kConfig.has_chunks() ? index_of(part) : 2 * index_of(part) + is_first;
    return params.parts + index * kConfig.part_floats();
  }
  u32 word() const { return shared + kConfig.words_at(); }

  // All threads: whether their block brings the last part.
  bool arrives_last(const DecodeParts& parts) const {
    ptx::block_sync();  // all threads -> the part; O, maxima, sums were read
    if (ptx::thread_index() == 0) {
      u64* const counter = counter_of(parts.first);
      const u32 brought = static_cast<u32>(parts.brought);
      const bool is_last = ptx::arrive(counter, brought) + brought == parts.count();
      if (is_last) *counter = params.stamp;  // for the next run
      ptx::store_shared(word(), is_last);
    }
    ptx::block_sync();  // thread 0 -> its answer
    return ptx::load_shared(word()) != 0;
  }

  static i32 state_in_part(i32 quad) { return kConfig.d_v + quad / 8 * 4; }

  void store_part(const RowTile<kConfig>& tile, const DecodeParts& parts) const {
    float* const part = part_of(parts.own, parts.own == parts.first);
    for_each_own_quad(tile, [&](i32 row, i32 quad) {
      if (4 * quad >= kConfig.d_v || row >= kRows) return;
      const DecodePartial x = own(tile, row, quad);
      float* const to = part + row * kConfig.part_row();
      ptx::store_l2_x4(to + 4 * quad, {{x.o[0], x.o[1], x.o[2], x.o[3]}});
      if (quad % 8 == 0) ptx::store_l2_x4(to + state_in_part(quad), {{x.maximum, x.sum, 0, 0}});
    });
  }

  // Quads over the keys of all parts.
  void add_parts(DecodePartial (&totals)[kTogether], const Quads& quads,
                 const DecodeParts& numbers) const {
    const i32 first = numbers.first, last = numbers.last;
#pragma unroll 1
    for (i32 begin = first; begin <= last; begin += kAtOnce) {
      DecodePartial parts[kTogether][kAtOnce + 1];
#pragma unroll
      for (i32 i = 0; i < kAtOnce; ++i) {  // those behind the last: the last again, with weight 0
        const i32 from = min(begin + i, last);
        const float* const part = part_of(from, from == first);
#pragma unroll
        for (i32 q = 0; q < kTogether; ++q) {
          const float* const row = part + quads[q].row * kConfig.part_row();
          const ptx::F32x4 o = ptx::load_l2_x4(row + min(4 * quads[q].number, kConfig.d_v - 4));
          const ptx::F32x2 state = ptx::load_l2_x2(row + state_in_part(quads[q].number));
          parts[q][i] = {begin + i <= last ? state.word[0] : -kInfinity<float>,
                         state.word[1],
                         {o.word[0], o.word[1], o.word[2], o.word[3]}};
        }
      }
#pragma unroll
      for (i32 q = 0; q < kTogether; ++q) {
        parts[q][kAtOnce] = totals[q];
        totals[q] = sum_of(parts[q], params.unit.log2s);
      }
    }
  }

  // Calls action(quads) for all quads of every `step`-th slice from `first` on, of all rows, some
  // at a time; whole warps together.
  template <i32 kCount, class Action>
  static void for_each_quads(const RowTile<kConfig>& tile, i32 first, i32 step,
                             const Action& action) {
    const i32 count = (num_slices(tile) - first + step - 1) / step;
#pragma unroll 1
    for (i32 n = static_cast<i32>(ptx::thread_index());
         n - static_cast<i32>(lane_index()) < 8 * count; n += kCount * kConfig.threads()) {
      Quad quads[kCount];
#pragma unroll
      for (i32 q = 0; q < kCount; ++q) {
        const i32 at = n + q * kConfig.threads();
        const i32 slice = first + min(at / 8, count - 1) * step;
        quads[q] = {slice / kConfig.row_slices(), slice % kConfig.row_slices() * 8 + at % 8,
                    at / 8 < count};
      }
      action(quads);
    }
  }
  // Those that this block adds up: slices are dealt to the blocks of the cluster in turn.
  template <i32 kCount, class Action>
  static void for_each_own_quads(const RowTile<kConfig>& tile, const Action& action) {
    for_each_quads<kCount>(tile, cluster_rank<kConfig>(), kConfig.cluster, action);
  }
  // One by one; rows that are none are the tile's kRows.
  template <class Action>
  static void for_each_own_quad(const RowTile<kConfig>& tile, const Action& action) {
    for_each_own_quads<1>(
        tile, [&](const Quad(&quads)[1]) { action(quads[0].stored_row(), quads[0].number); });
  }
  static i32 num_slices(const RowTile<kConfig>& tile) {
    return tile.num_rows() * kConfig.row_slices();
  }
  static i32 slice_number(i32 row, i32 quad) { return row * kConfig.row_slices() + quad / 8; }
  static i32 num_own_slices(const RowTile<kConfig>& tile) {
    return (num_slices(tile) - cluster_rank<kConfig>() + kConfig.cluster - 1) / kConfig.cluster;
  }

  // Four dims of a row over the keys of the block, and of the others of its cluster.
  DecodePartial own(const RowTile<kConfig>& tile, i32 row, i32 quad) const {
    if constexpr (!kInCluster) return of_splits(tile, row, quad);
    const i32 slice = slice_number(row, quad);
    const i32 number = min(slice / kConfig.cluster, num_own_slices(tile) - 1);
    DecodePartial parts[kConfig.cluster];
#pragma unroll
    for (i32 block = 0; block < kConfig.cluster; ++block) {
      const u32 at = slice_of(block, number);
      parts[block] = load_partial(at + quad % 8 * 16, at + 32 * 4);
    }
    return sum_of(parts, params.unit.log2s);
  }

  // In a cluster: that all slices of this block have arrived; where those of a block lie.
  u32 arrived() const { return shared + kConfig.barrier_at(); }
  u32 slice_of(i32 block, i32 number) const {
    return shared + kConfig.slices_at() +
           (block * kConfig.most_slices() + number) * kConfig.slice_bytes();
  }

  // Every block of the cluster gives the others what it has of their slices.
  void exchange_in_cluster(const RowTile<kConfig>& tile) {
    if (ptx::thread_index() == 0) {
      const i32 slices = kConfig.cluster * num_own_slices(tile);
      ptx::mbarrier_arrive_expect(arrived(), static_cast<u32>(slices * kConfig.slice_bytes()));
    }
    for_each_quads<1>(tile, 0, 1, [&](const Quad(&quads)[1]) {
      const auto& [row, quad, is_there] = quads[0];
      if (!is_there) return;
      const i32 slice = slice_number(row, quad);
      const u32 to = static_cast<u32>(slice % kConfig.cluster);
      const u32 full = ptx::map_shared(arrived(), to);
      const u32 at =
          ptx::map_shared(slice_of(cluster_rank<kConfig>(), slice / kConfig.cluster), to);
      const DecodePartial x = of_splits(tile, row, quad);
      ptx::store_async_x4(at + quad % 8 * 16, as_words({{x.o[0], x.o[1], x.o[2], x.o[3]}}), full);
      if (quad % 8 == 0)
        ptx::store_async_x4(at + 32 * 4, as_words({{x.maximum, x.sum, 0, 0}}), full);
    });
    ptx::mbarrier_wait_cluster(arrived(), parity);
    parity ^= 1;
  }
  static ptx::U32x4 as_words(const ptx::F32x4& x) { return __builtin_bit_cast(ptx::U32x4, x); }

  u32 exchange_row(i32 split, i32 row) const {
    return shared + kConfig.exchange_at() + split * kConfig.exchange_bytes() +
           row * kConfig.exchange_row() * 4;
  }
  u32 state_of(i32 split, i32 row) const {
    return shared + kConfig.states_at() + (split * kRows + row) * 8;
  }
  static void store(u32 address, float x) {
    ptx::store_shared(address, __builtin_bit_cast(u32, x));
  }
  static void store(u32 address, float x, float y) {
    ptx::store_shared_x2(address, {{__builtin_bit_cast(u32, x), __builtin_bit_cast(u32, y)}});
  }

  // Every warp puts its O, maxima and sums into shared memory.
  void exchange(DecodeConsumerSm80<kConfig>& consumer, i32 num_rows) const {
    const i32 split = Split<kConfig>::number();
    const bool is_lost = consumer.products.has_lost();
    constexpr float kWeightUnit = 1.f / (1 << kConfig.weight_log2());
    float sums[2];
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      sums[h] = consumer.row_sum(h) * kWeightUnit;
      if (consumer.is_bad || is_lost) sums[h] = -1;
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = DecodeLayout<kConfig>::row_of(h);
      if (row >= num_rows) continue;
      const float maximum = consumer.maximum[h] * consumer.row_unit(h);
      const float unit = kWeightUnit * (kConfig.scaled ? consumer.v_unit[h] : 1);
      if (DecodeLayout<kConfig>::is_first_of_row()) store(state_of(split, row), maximum, sums[h]);
      const u32 at = exchange_row(split, row);
      consumer.each_dim(h, [&](i32 dim, auto... x) {
        store(at + static_cast<u32>(dim) * 4, (kConfig.is_quantised() ? x * unit : x)...);
      });
    }
    ptx::block_sync();  // warps -> O, maxima, sums
  }

  // Four dims of a row over the keys of all splits.
  DecodePartial of_splits(const RowTile<kConfig>& tile, i32 row, i32 quad) const {
    row = max(0, min(row, tile.num_rows() - 1));
    quad = min(quad, kConfig.d_v / 4 - 1);
    DecodePartial parts[kConfig.splits];
#pragma unroll
    for (i32 split = 0; split < kConfig.splits; ++split) {
      parts[split] = load_partial(exchange_row(split, row) + quad * 16, state_of(split, row));
    }
    return sum_of(parts, params.unit.log2s);
  }

  static DecodePartial load_partial(u32 o_at, u32 state_at) {
    const ptx::F32x2 state = ptx::load_shared_f32x2(state_at);
    const auto o = __builtin_bit_cast(ptx::F32x4, ptx::load_shared_x4(o_at));
    return {state.word[0], state.word[1], {o.word[0], o.word[1], o.word[2], o.word[3]}};
  }
};

}  // namespace fulmen
