// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The fallback of the backward pass. Where a block of pairs is partly hidden, a product of loads
// multiplies the infinities and NaN of hidden pairs by 0, which makes NaN of gradients that never
// met them; so heads whose gradients are not finite are computed here again, pair by pair, without
// the hidden pairs. A warp computes one row of dQ, or of dK and dV; its lanes share the dimensions.
// Launched after backward_sm90 with few blocks; without such a head it returns at once.
#pragma once

#include "kernels/backward_sm90/config_beside.h"
#include "kernels/naive/naive.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <BackwardFallbackConfig kConfig>
struct BackwardFallback {
  static constexpr i32 kPerLane = BackwardFallbackConfig::kMaxDim / 32;
  static constexpr i32 kWarps = BackwardFallbackConfig::kThreads / 32;
  using HeadType = BackwardHead<kConfig>;
  using Row = RowGradient<HeadType>;

  const AttentionParams& p;
  i64 lane;

  // This lane's elements of a row: every 32nd, zeros past the end.
  struct Part {
    float element[kPerLane] = {};

    void add(float factor, const Part& x) {
#pragma unroll
      for (i32 n = 0; n < kPerLane; ++n) element[n] += factor * x.element[n];
    }
  };

  Part load(const ArrayView& array, i64 row, i64 dims) const {
    Part part;
#pragma unroll
    for (i32 n = 0; n < kPerLane; ++n) {
      const i64 d = lane + 32 * n;
      if (d < dims) part.element[n] = load_real_called<float>(array, row + d * array.strides[3]);
    }
    return part;
  }

  void store(const ArrayView& array, i64 row, i64 dims, const Part& part) const {
#pragma unroll
    for (i32 n = 0; n < kPerLane; ++n) {
      const i64 d = lane + 32 * n;
      if (d < dims) store_real_called(array, row + d * array.strides[3], part.element[n]);
    }
  }

  static float dot(const Part& a, const Part& b) {
    float sum = 0;
#pragma unroll
    for (i32 n = 0; n < kPerLane; ++n) sum += a.element[n] * b.element[n];
#pragma unroll
    for (u32 distance = 16; distance >= 1; distance /= 2) sum += ptx::shuffle_xor(sum, distance);
    return sum;
  }

  // A query row of a head, and a key row, as far as this lane has them.
  struct Query {
    Part q, dout;
    Row row;
  };
  Query query(const HeadType& head, i64 i) const {
    const Part q = load(p.q, head.q_row(p.q, i), p.dim_qk);
    const Part dout = load(p.dout, head.q_row(p.dout, i), p.dim_v);
    const Part o = load(p.o, head.q_row(p.o, i), p.dim_v);
    return {q, dout, Row(head, i, dot(dout, o))};
  }
  struct Key {
    Part k, v;
  };
  Key key(const HeadType& head, i64 j) const {
    return {load(p.k, head.kv_row(p.k, j), p.dim_qk), load(p.v, head.kv_row(p.v, j), p.dim_v)};
  }

  static PairGradient<float> pair(const HeadType& head, const Query& query, const Key& key, i64 i,
                                  i64 j) {
    const float capped = head.map.template score<typename HeadType::Math>(dot(query.q, key.k));
    return pair_gradient(head, query.row, i, j, capped, dot(query.dout, key.v));
  }

  // dQ[i] = sum over visible j of dX[i,j] K[j]
  void query_row(const HeadType& head, i64 i) const {
    const Query own = query(head, i);
    const Interval columns = own.row.saw_something() ? head.columns(i) : Interval{0, 0};
    Part dQ;
#pragma unroll 1
    for (i64 j = columns.begin; j < columns.end; ++j) {
      if (!head.sees(i, j)) continue;
      const Key other = key(head, j);
      dQ.add(pair(head, own, other, i, j).dX, other.k);
    }
    store(p.dq, head.q_row(p.dq, i), p.dim_qk, dQ);
  }

  // dK[j] = sum of dX[i,j] Q[i], dV[j] = sum of P[i,j] keep dO[i], over the rows that see j.
  void key_row(i64 index, i64 kv_head, i64 j) const {
    const HeadType first(p, index, kv_head * p.group_size());
    const Key own = key(first, j);
    const Interval rows = visible_rows(p.mask_options, first.sequence.shape, j);
    Part dK, dV;
#pragma unroll 1
    for (i64 member = 0; member < p.group_size(); ++member) {
      const HeadType head(p, index, kv_head * p.group_size() + member);
#pragma unroll 1
      for (i64 i = rows.begin; i < rows.end; ++i) {
        if (!head.sees(i, j)) continue;
        const Query other = query(head, i);
        if (!other.row.saw_something()) continue;
        const PairGradient<float> x = pair(head, other, own, i, j);
        dK.add(x.dX, other.q);
        dV.add(x.P_kept, other.dout);
      }
    }
    if (p.dk.present()) store(p.dk, first.kv_row(p.dk, j), p.dim_qk, dK);
    if (p.dv.present()) store(p.dv, first.kv_row(p.dv, j), p.dim_v, dV);
  }

  void batch_kv_head(i64 index, i64 kv_head) const {
    const i64 warp = i64{ptx::block_index()} * kWarps + ptx::thread_index() / 32;
    const i64 num_warps = i64{ptx::num_blocks()} * kWarps;
    const SequenceShape shape = load_sequence(p, index).shape;
    if (p.dq.present()) {
#pragma unroll 1
      for (i64 at = warp; at < shape.q_len * p.group_size(); at += num_warps) {
        const i64 member = at / shape.q_len;
        query_row(HeadType(p, index, kv_head * p.group_size() + member), at - member * shape.q_len);
      }
    }
    if (!p.dk.present() && !p.dv.present()) return;
#pragma unroll 1
    for (i64 j = warp; j < shape.kv_len; j += num_warps) key_row(index, kv_head, j);
  }
};

struct AttentionOnly {
  const AttentionParams& params;
};

template <BackwardFallbackConfig kConfig>
inline void backward_fallback_sm90(const BackwardFallbackParams& params) {
  ptx::grid_dependency_wait();
  if (params.nonfinite[0] == 0) return;
  // Heads look for a user's expression behind the arrays.
  const auto all = [&] {
    if constexpr (kConfig.user.any()) {
      return WithExpression<AttentionParams>{params.attention, expression_of(params)};
    } else {
      return AttentionOnly{params.attention};
    }
  }();
  const AttentionParams& p = all.params;
  const BackwardFallback<kConfig> fallback{p, i64{ptx::thread_index() % 32}};
  const i64 num_batch_kv_heads = p.num_sequences * p.heads_kv;
#pragma unroll 1
  for (i64 batch_kv_head = 0; batch_kv_head < num_batch_kv_heads; ++batch_kv_head) {
    if (params.nonfinite[1 + batch_kv_head] == 0) continue;
    fallback.batch_kv_head(batch_kv_head / p.heads_kv, batch_kv_head % p.heads_kv);
  }
}

}  // namespace fulmen
