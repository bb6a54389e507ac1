// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a warp of forward_sm80 does when it has met all keys: O / l, lse and statistics, and rows
// that must be computed again by forward_naive. A hidden key has weight 0, and 0 times NaN is NaN:
// rows of O that come out NaN or infinite though their sum is finite have met something hidden.
// Runs before any other use of shared memory by the warps of a group, all of them together.
#pragma once

#include "kernels/common/operand_scale.cuh"
#include "kernels/common/warp_scores_sm80.cuh"
#include "kernels/forward_sm80/softmax.cuh"
#include "kernels/naive/naive.cuh"

namespace fulmen {

template <ForwardSm80Config kConfig>
struct StoreFloat32OutputSm80 {
  const HeadOf<kConfig>& head;
  i32 warp_row;   // the warp's first
  i32 first_dim;  // of V and O

  void store(const float (&O)[kConfig.row_tiles][kConfig.d_v / 2]) const {
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) store_row(O[t], h, warp_row + WarpScores<kConfig>::row(t, h));
    }
  }

 private:
  void store_row(const float (&row)[kConfig.d_v / 2], i32 h, i64 i) const {
    if (i >= head.sequence.q_slot) return;
    const AttentionParams& p = head.p;
    const bool counts = i < head.sequence.shape.q_len;
    const i64 first = head.q_row(p.o, i) + first_dim * p.o.strides[3];
    const i64 num_dims = p.dim_v - first_dim;
#pragma unroll
    for (i32 n = 0; n < kConfig.d_v / 8; ++n) {
      const i64 dim = 8 * n + 2 * static_cast<i32>(lane_index() % 4);
      const float low = counts ? row[4 * n + 2 * h] : 0.f;
      const float high = counts ? row[4 * n + 2 * h + 1] : 0.f;
      if constexpr (kConfig.aligned) {
        const u64 pair =
            static_cast<u64>(__builtin_bit_cast(u32, high)) << 32 | __builtin_bit_cast(u32, low);
        if (dim < num_dims) *reinterpret_cast<u64*>(p.o.data + (first + dim) * 4) = pair;
      } else {
        if (dim < num_dims) store_real_called(p.o, first + dim * p.o.strides[3], low);
        if (dim + 1 < num_dims) store_real_called(p.o, first + (dim + 1) * p.o.strides[3], high);
      }
    }
  }
};

template <ForwardSm80Config kConfig>
struct StoreOutputSm80 {
  using Tile = SwizzledTile<kConfig.d_v, kConfig.swizzle>;
  using Output = float[kConfig.row_tiles][kConfig.warp_dims() / 2];
  using Group = RowGroupSm80<kConfig>;

  const HeadOf<kConfig>& head;
  i32 warp_row;   // the warp's first
  i32 first_dim;  // of V and O
  u32 shared;     // Q's tile, K and V behind it
  Group group;

  // All lanes together; all warps where rows of O are wider than those of Q.
  void store(const Output& O) const {
    if constexpr (!kConfig.aligned) {
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) store_numbers(O[t], t);
    } else {
      if constexpr (!kConfig.o_fits_q()) {
        ptx::block_sync();  // all are done with Q, K and V, where O goes
      } else {
        ptx::warp_sync();  // the warp is done with its rows of Q, where O goes
        group.sync();      // and so is the group
      }
      stage(O);
      ptx::warp_sync();  // lanes -> O
      group.sync();      // and that of the group
      send();
    }
  }

 private:
  Tile tile() const {
    constexpr i32 kRowBytes = max(kConfig.d_qk * kConfig.element_bytes(), kConfig.d_v * 2);
    return {shared + Group::first_row() * kRowBytes};
  }

  void stage(const Output& O) const {
    const u32 lane = lane_index();
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
#pragma unroll
        for (i32 n = 0; n < kConfig.warp_dims() / 8; ++n) {
          const float* const x = &O[t][4 * n + 2 * h];
          const u32 to = tile().address(16 * t + 8 * h + lane / 4, Group::vector(n));
          ptx::store_shared(to + lane % 4 * 4, ptx::pack<kConfig.output()>(x[0], x[1]));
        }
      }
    }
  }

  // Warps of a group alternate.
  void send() const {
    constexpr i32 kGroup = Tile::kGroup;
    constexpr i32 kRowsAtOnce = 32 / kGroup;
    constexpr i32 kStep = Group::kWarpsN * kRowsAtOnce;
    const AttentionParams& p = head.p;
    const i32 row =
        static_cast<i32>(Group::warp_n()) * kRowsAtOnce + static_cast<i32>(lane_index()) / kGroup;
    const i32 vector = static_cast<i32>(lane_index()) % kGroup;
    u16* to =
        reinterpret_cast<u16*>(p.o.data) + head.q_row(p.o, warp_row + row) + first_dim + vector * 8;
    const i32 rows = static_cast<i32>(head.sequence.q_slot) - warp_row - row;
    const i32 counted = head.sequence.shape.q_len - warp_row - row;
    const i32 num_vectors = (static_cast<i32>(p.dim_v) - first_dim) / 8 - vector;
#pragma unroll 1
    for (i32 r = 0; r < min(rows, kConfig.warp_rows() - row); r += kStep) {
#pragma unroll
      for (i32 u = 0; u < kConfig.d_v / 8; u += kGroup) {
        const ptx::U32x4 x = ptx::load_shared_x4(tile().address(r + row, u + vector));
        if (u < num_vectors) ptx::store_global_x4(to + u * 8, r < counted ? x : ptx::U32x4{});
      }
      to += kStep * p.o.strides[2];
    }
  }

  // Rows of tile t, in a loop that is not unrolled and therefore reads them from memory.
  void store_numbers(const float (&row)[kConfig.warp_dims() / 2], i32 t) const {
    const AttentionParams& p = head.p;
    const i64 i = warp_row + WarpScores<kConfig>::row(t, 0);
    const i64 offset = head.q_row(p.o, i) + first_dim * p.o.strides[3];
    float numbers[kConfig.warp_dims() / 2];
#pragma unroll
    for (i32 at = 0; at < kConfig.warp_dims() / 2; ++at) numbers[at] = row[at];
#pragma unroll 1
    for (i32 at = 0; at < kConfig.warp_dims() / 2; ++at) {
      const i32 further = 8 * (at / 2 % 2);
      const i64 d = 8 * Group::vector(at / 4) + 2 * static_cast<i32>(lane_index() % 4) + at % 2;
      if (i + further >= head.sequence.q_slot || first_dim + d >= p.dim_v) continue;
      store_real(p.o, offset + further * p.o.strides[2] + d * p.o.strides[3],
                 i + further < head.sequence.shape.q_len ? numbers[at] : 0.f);
    }
  }
};

template <ForwardSm80Config kConfig>
struct ForwardEpilogueSm80 {
  static constexpr i32 kTiles = kConfig.row_tiles;
  using Group = RowGroupSm80<kConfig>;
  using Output = float[kTiles][kConfig.warp_dims() / 2];
  using State = typename ForwardSoftmaxSm80<kConfig>::State;

  const HeadOf<kConfig>& head;
  i32 warp_row;   // the warp's first, in its sequence
  i32 first_dim;  // of V and O
  u32 shared;     // Q's tile
  Group group;

  // Rows of this thread whose result cannot be trusted, bit 2 t + h: sums that left their range, O
  // that is infinite or NaN.
  u32 find_bad_rows(const ForwardSoftmaxSm80<kConfig>& softmax, const Output& O) const {
    u32 bad_rows = 0;
#pragma unroll
    for (i32 at = 0; at < 2 * kTiles; ++at) {
      const i32 t = at / 2, h = at % 2;
      const bool counts = warp_row + WarpScores<kConfig>::row(t, h) < head.sequence.shape.q_len;
      if (counts && (softmax.has_overflowed(t, h) || !all_finite(O[t], h))) bad_rows |= 1u << at;
    }
    return bad_rows;
  }

  // A lane of a quad finishes one of its rows, number lane % 4, and hands the others its factor.
  void store(ForwardSoftmaxSm80<kConfig>& softmax, Output& O, u32 bad_rows) const {
    softmax.finish(group);
    const i32 own = static_cast<i32>(lane_index() % (2 * kTiles));
    const i64 i = warp_row + WarpScores<kConfig>::row(own / 2, own % 2);
    const bool counts = i < head.sequence.shape.q_len;
    const auto row = softmax.row(own);
    const State state = row.state();
    float factor = row.to_row_max() * state.normalizer(head.sink);
    if (kConfig.score.dropout) factor *= static_cast<float>(head.dropout.kept_scale());
    if (Group::warp_n() == 0) store_statistics(i, counts ? state : State{});
    normalize(O, factor);
    bad_rows = bad_rows_of_group(bad_rows);
    // Something hidden is infinite or NaN: the sum does not show it.
    const bool repeat = counts && (bad_rows >> own & 1) != 0 &&
                        (kConfig.dtype == DType::kFloat32 || state.row_sum - state.row_sum == 0);
    if constexpr (kConfig.dtype == DType::kFloat32) {
      StoreFloat32OutputSm80<kConfig>{head, warp_row, first_dim}.store(O);
    } else {
      StoreOutputSm80<kConfig>{head, warp_row, first_dim, shared, group}.store(O);
    }
    if (!ptx::any(repeat)) return;
    ptx::warp_sync();  // lanes -> rows that are overwritten below
    group.sync();      // and what the group wrote
    if (repeat && Group::warp_n() == 0 && lane_index() % 4 == static_cast<u32>(own))
      recompute_row(i);
  }

 private:
  void normalize(Output& O, float factor) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      const float factors[2] = {quad_value(factor, 2 * t), quad_value(factor, 2 * t + 1)};
#pragma unroll
      for (i32 at = 0; at < kConfig.warp_dims() / 2; ++at) O[t][at] *= factors[at / 2 % 2];
      if constexpr (kConfig.has_8_bits()) scale_dims(O[t], factors);
    }
  }

  // The scales of v: of a head, or of its dims. Rows that saw nothing stay 0.
  void scale_dims(float (&row)[kConfig.warp_dims() / 2], const float (&factors)[2]) const {
    const AttentionParams& p = head.p;
    if (!p.v_scale.present()) return;
    const i64 first = p.v_scale.offset(head.sequence.batch, head.kv_head, 0, first_dim);
    const i32 last = static_cast<i32>(p.dim_v) - first_dim - 1;
#pragma unroll
    for (i32 at = 0; at < kConfig.warp_dims() / 2; at += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 dim = 2 * at + 2 * static_cast<i32>(lane_index() % 4) + c;
        const float scale = load_scale(p.v_scale, first + min(dim, last) * p.v_scale.strides[3]);
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          if (factors[h] != 0) row[at + 2 * h + c] *= scale;
        }
      }
    }
  }

  // That of lane `lane` of the quad.
  static float quad_value(float x, i32 lane) {
    const i32 from = static_cast<i32>(lane_index() / 4 * 4) + lane;
    return __builtin_bit_cast(float,
                              ptx::shuffle(__builtin_bit_cast(i32, x), static_cast<u32>(from)));
  }

  // Those of the quad and of the group.
  u32 bad_rows_of_group(u32 bad_rows) const {
    bad_rows |= ptx::shuffle_xor(bad_rows, 1);
    bad_rows |= ptx::shuffle_xor(bad_rows, 2);
    if constexpr (!Group::kIsOneWarp) {
      float is_bad[kTiles][2];
#pragma unroll
      for (i32 at = 0; at < 2 * kTiles; ++at) {
        is_bad[at / 2][at % 2] = static_cast<float>(bad_rows >> at & 1);
      }
      group.all_reduce(is_bad, [](float a, float b) { return ptx::max(a, b); });
      bad_rows = 0;
#pragma unroll
      for (i32 at = 0; at < 2 * kTiles; ++at) {
        if (is_bad[at / 2][at % 2] != 0) bad_rows |= 1u << at;
      }
    }
    return bad_rows;
  }

  static bool all_finite(const float (&row)[kConfig.warp_dims() / 2], i32 h) {
    float sum = 0;  // infinities and NaN stay; an overflow of its own costs a repetition
#pragma unroll
    for (i32 i = 2 * h; i < kConfig.warp_dims() / 2; i += 4) sum += row[i] + row[i + 1];
    return sum - sum == 0;
  }

  void recompute_row(i64 i) const {
    const AttentionParams& p = head.p;
    const i64 last = min(num_chunks(p.dim_v), ceil_div(first_dim + kConfig.d_v, kNaiveChunk));
    for (i64 chunk = first_dim / kNaiveChunk; chunk < last; ++chunk) {
      naive_chunk(p, {head.sequence.batch, head.head, head.sequence.q_begin + i, chunk});
    }
  }
  __attribute__((noinline)) static void naive_chunk(const AttentionParams& p, const RowTask& task) {
    forward_naive_row<HeadOf<kConfig>>(p, task);
  }

  void store_statistics(i64 i, const State& state) const {
    const AttentionParams& p = head.p;
    if (first_dim != 0 || lane_index() % 4 >= 2 * kTiles || i >= head.sequence.q_slot) return;
    if (p.lse.present()) store_float(p.lse, head.q_row(p.lse, i), state.lse());
    if (kConfig.score.stats && p.stats.present()) {
      store_float(p.stats, head.q_row(p.stats, i), state.row_max);
      store_float(p.stats, head.q_row(p.stats, i) + p.stats.strides[3], state.row_sum);
    }
  }
  static void store_float(const ArrayView& array, i64 offset, float x) {
    store_element(array.data + offset * 4, x);
  }
};

}  // namespace fulmen
