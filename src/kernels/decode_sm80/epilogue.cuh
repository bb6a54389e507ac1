// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What becomes of the splits' results at the end of a row tile: together, and with those of other
// blocks of a cluster, they are its result, or a part of it, which goes to the workspace. The block
// that brings the last part adds all of them, in the order of their keys, so that equal calls give
// equal bits. A hidden key has weight 0, and 0 times NaN is NaN: rows of O that come out NaN or
// infinite though their sum is finite have met something hidden, and are computed again by
// forward_naive; so are those of a row tile some of whose keys have no page or, of 8 bits, no
// finite value. Where rows see all keys of their tile, the former is no concern, and those without
// a page are empty: kernels for that compile in half the time.
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/accurate_math.cuh"
#include "kernels/decode_sm80/consumer.cuh"
#include "kernels/decode_sm80/operands.cuh"
#include "kernels/naive/naive.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Four neighbouring dims of a row over some of its keys: the sum of exp2(log2s (s - maximum)) v,
// and the row's own; a sum of -1 where some of them have no page, or no finite value.
struct DecodePartial {
  float maximum = -kInfinity<float>;
  float sum = 0;
  float o[4] = {0, 0, 0, 0};
};

// Over the keys of all of them: attention/softmax_state.cuh.
template <i32 kCount>
DecodePartial sum_of(const DecodePartial (&parts)[kCount], float log2s) {
  DecodePartial total;
#pragma unroll
  for (const DecodePartial& part : parts) total.maximum = ptx::max(total.maximum, part.maximum);
  const float top = total.maximum == -kInfinity<float> ? 0.f : total.maximum;
  bool is_bad = false;
#pragma unroll
  for (const DecodePartial& part : parts) {
    const float weight = ptx::exp2((part.maximum - top) * log2s);
    is_bad |= part.sum < 0;
    total.sum += weight * part.sum;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) total.o[i] += weight * part.o[i];
  }
  if (is_bad) total.sum = -1;
  return total;
}

// Results of a row tile on their way to o, lse and stats.
template <DecodeSm80Config kConfig>
struct StoreRowTile {
  using State = SoftmaxState<AccurateMath<float>>;

  const RowTile<kConfig>& tile;

  // Dims 4 quad .. of a row. All lanes of a warp together; 8 of them have a chunk of forward_naive.
  void store(i32 row, i32 quad, const DecodePartial& total) const {
    const AttentionParams& p = tile.p;
    const i32 dim = 4 * quad;
    const bool is_row = row < tile.num_rows();
    const bool counts = tile.counts(row) && (kConfig.may_recompute() || !(total.sum < 0));
    const State state = counts ? State{total.maximum * tile.unit.nats, total.sum} : State{};
    float sink = -kInfinity<float>;
    if (p.sinks.present() && is_row) {
      sink = load_real_called<float>(p.sinks, p.sinks.offset(0, tile.head_of(row), 0, 0));
    }
    const float factor = counts ? state.normalizer(sink) : 0.f;
    if (is_row && dim < p.dim_v) {
      float o[4];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) o[i] = counts ? total.o[i] * factor : 0.f;
      store_o(tile.offset(p.o, row, dim), o);
    }
    if (is_row && quad == 0) store_statistics(row, state);
    if constexpr (kConfig.may_recompute()) {
      const float all = total.o[0] + total.o[1] + total.o[2] + total.o[3];
      const bool is_odd = all - all != 0 || total.sum < 0;
      recompute_if(counts && dim < p.dim_v && total.sum - total.sum == 0 && is_odd, row, quad);
    }
  }

  // o = 0, lse = -inf.
  void clear(i32 row, i32 quad) const {
    if (4 * quad < tile.p.dim_v) store_o(tile.offset(tile.p.o, row, 4 * quad), {0, 0, 0, 0});
    if (quad == 0) store_statistics(row, State{});
  }

 private:
  // All lanes of a warp together.
  void recompute_if(bool is_bad, i32 row, i32 quad) const {
    const u32 bad_lanes = ptx::ballot(is_bad);
    if (bad_lanes == 0) return;
    ptx::warp_sync();  // lanes -> what is overwritten below
    if ((bad_lanes >> (lane_index() & 24) & 0xff) == 0 || quad % 8 != 0) return;
    static_assert(kNaiveChunk == 32);
    const i64 query = i64{tile.sequence.q_begin} + tile.query_of(row);
    recompute(tile.p, {tile.sequence.batch, tile.head_of(row), query, quad / 8});
  }

  void store_o(i64 offset, const float (&o)[4]) const {
    const AttentionParams& p = tile.p;
    if constexpr (kConfig.score.fp32_out) {
      *reinterpret_cast<ptx::F32x4*>(p.o.data + offset * 4) = {{o[0], o[1], o[2], o[3]}};
    } else {
      *reinterpret_cast<ptx::U32x2*>(p.o.data + offset * 2) = {
          {ptx::pack<kConfig.dtype>(o[0], o[1]), ptx::pack<kConfig.dtype>(o[2], o[3])}};
    }
  }

  // In statistics the maximum covers every score: that of the softmax may lag behind it by 2^8, so
  // it is the row's logarithm, rounded up.
  void store_statistics(i32 row, const State& state) const {
    const AttentionParams& p = tile.p;
    if (p.lse.present()) {
      store_element(p.lse.data + tile.offset(p.lse, row, 0) * 4, state.lse());
    }
    if constexpr (kConfig.score.stats) {
      State saved = state;
      if (state.row_sum != 0) {
        const float top = state.lse();
        saved.row_max = top + ptx::abs(top) * 0x1p-22f;
        saved.row_sum = state.row_sum * AccurateMath<float>::exp(state.row_max - saved.row_max);
      }
      const i64 at = tile.offset(p.stats, row, 0);
      store_element(p.stats.data + at * 4, saved.row_max);
      store_element(p.stats.data + (at + p.stats.strides[3]) * 4, saved.row_sum);
    }
  }

  __attribute__((noinline)) static void recompute(const AttentionParams& p, const RowTask& task) {
    forward_naive_row<kConfig.dtype, kConfig.caches(), kConfig.kv_dtype()>(p, task);
  }
};

// Numbers of the parts of a row tile, and of this block's: those of workers, or of chunks of keys.
struct DecodeParts {
  i32 own;
  i32 first;
  i32 last;
};

template <DecodeSm80Config kConfig>
struct DecodeEpilogueSm80 {
  static constexpr i32 kRows = kConfig.used_rows();
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
    if (is_whole || arrives_last(parts)) {
      for_each_own_quad(tile, [&](i32 row, i32 quad) {
        result.store(row, quad, is_whole ? own(tile, row, quad) : of_parts(row, quad, parts));
      });
    }
  }

  // Before the next row tile: O, maxima and sums were read.
  void release() const {
    if constexpr (kInCluster) {
      ptx::cluster_arrive();
    } else {
      ptx::block_sync();
    }
  }

 private:
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
      const bool is_last = ptx::arrive(counter) == static_cast<u32>(parts.last - parts.first);
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

  // Four dims of a row over the keys of all parts.
  DecodePartial of_parts(i32 row, i32 quad, const DecodeParts& numbers) const {
    constexpr i32 kAtOnce = 16;
    const i32 first = numbers.first, last = numbers.last;
    const float log2s = params.unit.log2s;
    const i32 at = min(row, kRows - 1) * kConfig.part_row();
    const i32 dim = min(4 * quad, kConfig.d_v - 4);
    const i32 state = state_in_part(quad);
    DecodePartial total;
#pragma unroll 1
    for (i32 begin = first; begin <= last; begin += kAtOnce) {
      DecodePartial parts[kAtOnce + 1];
#pragma unroll
      for (i32 i = 0; i < kAtOnce; ++i) {  // those behind the last: the last again, with weight 0
        const i32 from = min(begin + i, last);
        const float* const part = part_of(from, from == first) + at;
        const ptx::F32x4 o = ptx::load_l2_x4(part + dim);
        const float maximum = ptx::load_l2(part + state);
        parts[i] = {begin + i <= last ? maximum : -kInfinity<float>,
                    ptx::load_l2(part + state + 1),
                    {o.word[0], o.word[1], o.word[2], o.word[3]}};
      }
      parts[kAtOnce] = total;
      total = sum_of(parts, log2s);
    }
    return total;
  }

  // Calls action(row, quad) for all quads of every `step`-th slice from `first` on, of all rows;
  // whole warps together, so that some rows are beyond the tile's.
  template <class Action>
  static void for_each_quad(const RowTile<kConfig>& tile, i32 first, i32 step,
                            const Action& action) {
    const i32 count = (num_slices(tile) - first + step - 1) / step;
#pragma unroll 1
    for (i32 n = static_cast<i32>(ptx::thread_index());
         n - static_cast<i32>(lane_index()) < 8 * count; n += kConfig.threads()) {
      const i32 slice = first + n / 8 * step;
      action(slice / kConfig.row_slices(), slice % kConfig.row_slices() * 8 + n % 8);
    }
  }
  // Those that this block adds up: slices are dealt to the blocks of the cluster in turn.
  template <class Action>
  static void for_each_own_quad(const RowTile<kConfig>& tile, const Action& action) {
    for_each_quad(tile, cluster_rank<kConfig>(), kConfig.cluster, action);
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
    for_each_quad(tile, 0, 1, [&](i32 row, i32 quad) {
      if (row >= tile.num_rows()) return;
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
    return shared + kConfig.exchange_at() + (split * kRows + row) * kConfig.exchange_row() * 4;
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
    const bool is_lost = ptx::any((consumer.lost & kLostBits) != 0);
    constexpr float kWeightUnit = 1.f / (1 << kConfig.weight_log2());
    const float unit = kWeightUnit * (kConfig.scaled ? consumer.v_unit : 1);
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
