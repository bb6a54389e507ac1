// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What becomes of the splits' results at the end of a row tile: together they are its result, or a
// part of it, which goes to the workspace. The block that brings the last part adds all of them, in
// the order of their keys, so that equal calls give equal bits. A hidden key has weight 0, and 0
// times NaN is NaN: rows of O that come out NaN or infinite though their sum is finite have met
// something hidden, and are computed again by forward_naive; so are those of a row tile some of
// whose keys have no page or, of 8 bits, no finite value. Where rows see all keys of their tile,
// the former is no concern, and those without a page are empty: kernels for that compile in half
// the time.
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/accurate_math.cuh"
#include "kernels/decode_sm80/consumer.cuh"
#include "kernels/naive/naive.cuh"
#include "kernels/ptx/grid.cuh"

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
  static constexpr i32 kQuads = static_cast<i32>(ceil_div(kConfig.d_v, 32)) * 8;  // of a row

  const RowTile<kConfig>& tile;

  // Dims 4 quad .. of a row. All lanes of a warp together; 8 of them have a chunk of forward_naive.
  void store(i32 row, i32 quad, const DecodePartial& total) const {
    const AttentionParams& p = tile.p;
    const i32 dim = 4 * quad;
    const bool is_row = row < tile.num_rows();
    const bool counts = tile.counts(row) && (kConfig.may_recompute() || !(total.sum < 0));
    const State state = counts ? State{total.maximum * score_nats<kConfig>(p), total.sum} : State{};
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
  static constexpr i32 kRows = kConfig.rows();
  static constexpr i32 kQuads = StoreRowTile<kConfig>::kQuads;

  const DecodeSm80Params& params;
  u32 shared;

  // Readies the counters of the row tiles that parts of this block may belong to: this one, and
  // that which begins here.
  void start(const DecodeParts& parts) const {
    if (ptx::thread_index() != 0) return;
    ptx::start_counter(counter_of(parts.first), params.stamp);
    if (!kConfig.has_chunks()) ptx::start_counter(counter_of(parts.own), params.stamp);
  }

  // All warps of the block.
  void leave(DecodeConsumerSm80<kConfig>& consumer, const RowTile<kConfig>& tile,
             const DecodeParts& parts) const {
    exchange(consumer);
    const bool is_whole = parts.first == parts.last;
    if (!is_whole) {
      store_part(tile, parts);
      if (!arrives_last(parts)) return;
    }
    const StoreRowTile<kConfig> result{tile};
    for_each_quad(tile, [&](i32 row, i32 quad) {
      result.store(row, quad, is_whole ? of_splits(row, quad) : of_parts(row, quad, parts));
    });
    ptx::block_sync();  // O, maxima, sums were read
  }

 private:
  // Of all row tiles.
  i64 index_of(i32 part) const {
    return i64{part} * params.row_tiles + ptx::block_index() % params.row_tiles;
  }
  u64* counter_of(i32 part) const { return params.counters + index_of(part); }
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

  void store_part(const RowTile<kConfig>& tile, const DecodeParts& parts) const {
    float* const part = part_of(parts.own, parts.own == parts.first);
    for_each_quad(tile, [&](i32 row, i32 quad) {
      if (4 * quad >= kConfig.d_v || row >= kRows) return;
      const DecodePartial x = of_splits(row, quad);
      float* const to = part + row * kConfig.part_row();
      ptx::store_l2_x4(to + 4 * quad, {{x.o[0], x.o[1], x.o[2], x.o[3]}});
      if (quad == 0) ptx::store_l2_x4(to + kConfig.d_v, {{x.maximum, x.sum, 0, 0}});
    });
  }

  // Four dims of a row over the keys of all parts.
  DecodePartial of_parts(i32 row, i32 quad, const DecodeParts& numbers) const {
    constexpr i32 kAtOnce = 16;
    const i32 first = numbers.first, last = numbers.last;
    const float log2s = score_log2<kConfig>(params.attention);
    const i32 at = min(row, kRows - 1) * kConfig.part_row();
    const i32 dim = min(4 * quad, kConfig.d_v - 4);
    DecodePartial total;
#pragma unroll 1
    for (i32 begin = first; begin <= last; begin += kAtOnce) {
      DecodePartial parts[kAtOnce + 1];
#pragma unroll
      for (i32 i = 0; i < kAtOnce; ++i) {  // those behind the last: the last again, with weight 0
        const i32 from = min(begin + i, last);
        const float* const part = part_of(from, from == first) + at;
        const ptx::F32x4 o = ptx::load_l2_x4(part + dim);
        const float maximum = ptx::load_l2(part + kConfig.d_v);
        parts[i] = {begin + i <= last ? maximum : -kInfinity<float>,
                    ptx::load_l2(part + kConfig.d_v + 1),
                    {o.word[0], o.word[1], o.word[2], o.word[3]}};
      }
      parts[kAtOnce] = total;
      total = sum_of(parts, log2s);
    }
    return total;
  }

  // Calls action(row, quad) for all quads of all rows; whole warps together, so that some rows are
  // beyond the tile's.
  template <class Action>
  static void for_each_quad(const RowTile<kConfig>& tile, const Action& action) {
    const i32 all = tile.num_rows() * kQuads;
#pragma unroll 1
    for (i32 n = static_cast<i32>(ptx::thread_index()); n - static_cast<i32>(lane_index()) < all;
         n += kConfig.threads()) {
      action(n / kQuads, n % kQuads);
    }
  }

  u32 exchange_row(i32 split, i32 row) const {
    return shared + kConfig.exchange_at() + (split * kRows + row) * kConfig.exchange_row() * 4;
  }
  u32 state_of(i32 split, i32 row) const {
    return shared + kConfig.states_at() + (split * kRows + row) * 8;
  }
  static void store_pair(u32 address, float x, float y) {
    ptx::store_shared_x2(address, {{__builtin_bit_cast(u32, x), __builtin_bit_cast(u32, y)}});
  }

  // Every warp puts its O, maxima and sums into shared memory.
  void exchange(DecodeConsumerSm80<kConfig>& consumer) const {
    const i32 split = Split<kConfig>::number();
    const bool is_lost = ptx::any((consumer.lost & kLostBits) != 0);
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = consumer.row_of(h);
      float sum = consumer.sum[h];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if (consumer.is_bad || is_lost) sum = -1;
      if (lane_index() % 4 == 0) store_pair(state_of(split, row), consumer.maximum[h], sum);
      consumer.each_pair_of_dims(h, [&](i32 dim, float x, float y) {
        store_pair(exchange_row(split, row) + static_cast<u32>(dim) * 4, x, y);
      });
    }
    ptx::block_sync();  // warps -> O, maxima, sums
  }

  // Four dims of a row over the keys of all splits.
  DecodePartial of_splits(i32 row, i32 quad) const {
    row = min(row, kRows - 1);
    quad = min(quad, kConfig.d_v / 4 - 1);
    DecodePartial parts[kConfig.splits];
#pragma unroll
    for (i32 split = 0; split < kConfig.splits; ++split) {
      const ptx::F32x2 state = ptx::load_shared_f32x2(state_of(split, row));
      const ptx::U32x4 o = ptx::load_shared_x4(exchange_row(split, row) + quad * 16);
      parts[split] = {state.word[0], state.word[1], {}};
#pragma unroll
      for (i32 i = 0; i < 4; ++i) parts[split].o[i] = __builtin_bit_cast(float, o.word[i]);
    }
    return sum_of(parts, score_log2<kConfig>(params.attention));
  }
};

}  // namespace fulmen
