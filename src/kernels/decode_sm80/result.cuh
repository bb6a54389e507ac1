// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Partial results, their sum, and the way of a row tile's to o, lse and stats. A hidden key has
// weight 0, and 0 times NaN is NaN: rows of O that come out NaN or infinite though their sum is
// finite have met something hidden, and are computed again by forward_naive; so are those of a row
// tile some of whose keys have no page or, of 8 bits, no finite value. Where rows see all keys of
// their tile, the former is no concern, and those without a page are empty: kernels for that
// compile in half the time.
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/accurate_math.cuh"
#include "kernels/decode_sm80/operands.cuh"
#include "kernels/naive/naive.cuh"

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

  static constexpr i32 kChunkDims = static_cast<i32>(kNaiveChunk);
  // Dims from kChunkDims * chunk on.
  void recompute_chunk(i32 row, i32 chunk) const {
    const i64 query = i64{tile.sequence.q_begin} + tile.query_of(row);
    recompute(tile.p, {tile.sequence.batch, tile.head_of(row), query, chunk});
  }
  // The same behind setmaxnreg: of numbers, since all threads of an H200 computed one and the same
  // task where they had the address of a RowTask (NVRTC 13.0).
  __attribute__((noinline)) static void recompute(const AttentionParams& p, i64 batch, i64 head,
                                                  i64 row, i64 chunk) {
    forward_naive_row<Head<kConfig.dtype, kConfig.caches(), kConfig.kv_dtype()>>(
        p, {batch, head, row, chunk});
  }

 private:
  // All lanes of a warp together.
  void recompute_if(bool is_bad, i32 row, i32 quad) const {
    const u32 bad_lanes = ptx::ballot(is_bad);
    if (bad_lanes == 0) return;
    ptx::warp_sync();  // lanes -> what is overwritten below
    if ((bad_lanes >> (lane_index() & 24) & 0xff) == 0 || quad % 8 != 0) return;
    static_assert(kNaiveChunk == 32);
    recompute_chunk(row, quad / 8);
  }

  __attribute__((noinline)) static void recompute(const AttentionParams& p, const RowTask& task) {
    forward_naive_row<Head<kConfig.dtype, kConfig.caches(), kConfig.kv_dtype()>>(p, task);
  }
};

}  // namespace fulmen
