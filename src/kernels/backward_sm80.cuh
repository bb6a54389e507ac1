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
#include "kernels/ptx/grid.cuh"
#include "kernels/tile/block_products.cuh"
#include "kernels/tile/store_output.cuh"
#include "kernels/tile/warp_terms.cuh"

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
  using QkTile = SwizzledTile<kConfig.d_qk, kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.d_v, kConfig.swizzle>;
  using PairTile = SwizzledTile<kConfig.columns, kConfig.swizzle>;
  using Terms = WarpTerms<kConfig.scores()>;
  static constexpr i32 kTiles = kConfig.s_rows / 16;
  static constexpr i32 kFloats = kConfig.s_columns / 2;
  using Scores = float[kTiles][kFloats];
  using Rows = Sm80Row[kTiles][2];
  static constexpr i32 kKvTiles = kConfig.kv_rows / 16;
  static constexpr float kHidden = -0.f;  // P of a hidden pair; no exponential is negative
  static_assert(kConfig.valid());

  const Sm80BackwardParams& params;
  const AttentionParams& p;
  i64 index;  // of the sequence
  Sequence sequence;
  i64 kv_head;
  i64 first_key;
  i64 q_slot;  // of the first tile of queries, among num_slots of a head
  i64 num_slots;
  BlockRange range{};
  u32 shared = ptx::dynamic_shared();
  u32 warp = warp_index();
  float dK[kKvTiles][kConfig.dk_dims() / 2];
  float dV[kKvTiles][kConfig.dv_dims() / 2];
  bool suspect = false;

  BackwardSm80(const Sm80BackwardParams& params_, const HeadType& head, const TilePlace& place)
      : params(params_),
        p(params_.attention),
        index(place.index),
        sequence(head.sequence),
        kv_head(head.kv_head),
        first_key(place.first_row),
        q_slot(p.packed ? first_slot(sequence.q_begin, place.index, kConfig.rows) : 0),
        num_slots(num_tile_slots(p, p.q_rows, kConfig.rows)) {
    clear(dK);
    clear(dV);
  }

  const SequenceShape& shape() const { return sequence.shape; }

  QkTile k_tile() const { return {shared}; }
  VTile v_tile() const { return {shared + kConfig.k_bytes()}; }
  u32 stage_at(i32 stage) const {
    return shared + kConfig.k_bytes() + kConfig.v_bytes() + stage * kConfig.stage_bytes();
  }
  QkTile q_tile(i32 stage) const { return {stage_at(stage)}; }
  VTile dout_tile(i32 stage) const { return {stage_at(stage) + kConfig.q_bytes()}; }
  PairTile p_tile() const { return {stage_at(kConfig.stages)}; }
  PairTile ds_tile() const { return {stage_at(kConfig.stages) + kConfig.pair_bytes()}; }
  u32 rows_at() const { return ds_tile().base + kConfig.pair_bytes(); }
  u32 terms_at() const {
    return shared + kConfig.shared_bytes() - kConfig.term_bytes() +
           warp * 16 * kConfig.scores().term_stride() * 4;
  }

  i64 tile_number(i64 head, i64 block) const {
    return row_tile_number(p, sequence.batch, head, q_slot + block, num_slots);
  }

  // ---- 1: what arrives ------------------------------------------------------------------------

  void fetch_keys() const {
    copy_rows<kConfig.columns, kConfig.threads()>(k_tile(), key_source(p.k, p.dim_qk),
                                                  static_cast<i32>(first_key));
    copy_rows<kConfig.columns, kConfig.threads()>(v_tile(), key_source(p.v, p.dim_v),
                                                  static_cast<i32>(first_key));
  }
  RowSource key_source(const ArrayView& array, i64 dims) const {
    return {array, array.offset(sequence.batch, kv_head, sequence.kv_begin, 0), shape().kv_len,
            dims};
  }

  void fetch(i64 head, i64 block, i32 stage) const {
    const auto source = [&](const ArrayView& array, i64 dims) {
      return RowSource(array, array.offset(sequence.batch, head, sequence.q_begin, 0),
                       shape().q_len, dims);
    };
    const i32 first = static_cast<i32>(block * kConfig.rows);
    copy_rows<kConfig.rows, kConfig.threads()>(q_tile(stage), source(p.q, p.dim_qk), first);
    copy_rows<kConfig.rows, kConfig.threads()>(dout_tile(stage), source(p.dout, p.dim_v), first);
    ptx::cp_async_commit();
  }

  // What is kept of the rows, which has one place only.
  void fetch_rows(i64 head, i64 block) const {
    const u8* const rows =
        reinterpret_cast<const u8*>(params.rows + tile_number(head, block) * kConfig.rows);
#pragma unroll
    for (i32 at = 0; at < kConfig.rows; at += kConfig.threads()) {
      const i32 r = at + static_cast<i32>(ptx::thread_index());
      if (r < kConfig.rows) ptx::cp_async_16(rows_at() + r * 16, rows + r * 16, true);
    }
    ptx::cp_async_commit();
  }

  // ---- 2 and 3: pairs of a warp's tile ---------------------------------------------------------

  // S = P, kHidden where hidden. In nats where config.natural says so, else scaled here.
  void weigh(Scores& S, const Rows& rows, bool careful) const {
    constexpr float kLog2E = kWarpLog2E;
    const float unit = kConfig.natural ? 1.f : static_cast<float>(p.score_map.scale);
    const float unit_log2 =
        kConfig.natural ? kLog2E : static_cast<float>(p.score_map.scale * 1.4426950408889634);
    float largest = 0;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        largest = ptx::max(largest, ptx::max(rows[t][h].row_max, -rows[t][h].row_max));
      }
    }
    if (ptx::any(largest * kLog2E > 1024)) {  // a product with row_max is not exact enough
      exponentiate(S, careful, [&](float s, i32 t, i32 h) {
        const float below = ptx::max(rows[t][h].row_max - ptx::mul(s, unit), 0.f);
        return ptx::fma(-below, kLog2E, -rows[t][h].sum_log2);
      });
      return;
    }
    float lse_log2[kTiles][2];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        lse_log2[t][h] = ptx::fma(rows[t][h].row_max, kLog2E, rows[t][h].sum_log2);
      }
    }
    exponentiate(S, careful,
                 [&](float s, i32 t, i32 h) { return ptx::fma(s, unit_log2, -lse_log2[t][h]); });
  }

  template <class Exponent>
  static void exponentiate(Scores& S, bool careful, const Exponent& exponent) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      if (careful) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) {
          const float s = S[t][i];
          S[t][i] = s == kMinusInfinity ? kHidden : ptx::exp2(exponent(s, t, i / 2 % 2));
        }
      } else {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) S[t][i] = ptx::exp2(exponent(S[t][i], t, i / 2 % 2));
      }
    }
  }

  static bool all_finite(const Scores& S) {
    float sum = 0;  // of x - x: 0, or NaN
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) sum += S[t][i] - S[t][i];
    }
    return sum == 0;
  }

  // A warp's tile of P or dS, rounded, to shared memory.
  static void share(const Scores& S, const PairTile& tile, i32 row, i32 column) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; i += 2) {
        const u32 r = row + Terms::row(t, i / 2 % 2);
        const u32 unit = column / 8 + i / 4;
        ptx::store_shared(tile.address(r, unit) + lane_index() % 4 * 4,
                          ptx::pack<kConfig.dtype>(S[t][i], S[t][i + 1]));
      }
    }
  }

  // dP = dO V^T, of which dropout leaves what it left of P: bits of `kept`.
  void multiply_dout_v(Scores& dP, i32 stage, i32 row, i32 column) const {
    const auto dO = left_rows(dout_tile(stage), row);
    const auto V = right_rows(v_tile());
    clear(dP);
    multiply_tiles<kConfig.dtype, kConfig.d_v / 16>(
        dP, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(dO.at(k, 16 * t)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(V.at(k, column + 16 * n)); });
  }

  void multiply_q_k(Scores& S, i32 stage, i32 row, i32 column) const {
    const auto Q = left_rows(q_tile(stage), row);
    const auto K = right_rows(k_tile());
    clear(S);
    multiply_tiles<kConfig.dtype, kConfig.d_qk / 16>(
        S, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(Q.at(k, 16 * t)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(K.at(k, column + 16 * n)); });
  }

  void read_rows(Rows& rows, i32 row) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const ptx::U32x4 x = ptx::load_shared_x4(rows_at() + (row + Terms::row(t, h)) * 16);
        rows[t][h] = {__builtin_bit_cast(float, x.word[0]), __builtin_bit_cast(float, x.word[1]),
                      __builtin_bit_cast(float, x.word[2]), __builtin_bit_cast(float, x.word[3])};
      }
    }
  }

  // dS / dS before the cap, from raw dot products.
  void cap_slopes(Scores& slope, const HeadType& head) const {
    const float twice_log2 = 2 * kWarpLog2E * head.map.scale / head.map.softcap;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const float x = tanh_log2(slope[t][i] * twice_log2);
        slope[t][i] = ptx::fma(-x, x, 1.f);
      }
    }
  }

  // dP = dS
  void form_ds(Scores& dP, const Scores& P, const Rows& rows, bool careful) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const Sm80Row& row = rows[t][i / 2 % 2];
        const float G =
            kConfig.split_sum ? ptx::fma(row.share, dP[t][i], row.offset) : dP[t][i] + row.offset;
        dP[t][i] = P[t][i] * G;
        if (careful && __builtin_bit_cast(u32, P[t][i]) == __builtin_bit_cast(u32, kHidden)) {
          dP[t][i] = 0;
        }
      }
    }
  }

  void compute_pairs(const HeadType& head, i64 block, bool is_full, i32 stage, i32 tile) {
    constexpr i32 kAcross = kConfig.columns / kConfig.s_columns;
    const i32 row = tile / kAcross * kConfig.s_rows;
    const i32 column = tile % kAcross * kConfig.s_columns;
    const Terms terms{head, block * kConfig.rows + row, terms_at()};
    const i64 key = first_key + column;
    const bool careful = kConfig.terms || !is_full;
    Rows rows;
    read_rows(rows, row);
    Scores P, slope;
    multiply_q_k(P, stage, row, column);
    if (careful) suspect = suspect || !all_finite(P);
    if constexpr (kConfig.softcap) {
      copy(slope, P);
      cap_slopes(slope, head);
    }
    if (kConfig.natural || careful) terms.apply(P, key, is_full);
    weigh(P, rows, careful);
    u32 kept[kTiles * kFloats / 32 + 1] = {};
    share_p(P, kept, rows, terms, key, row, column);
    if (!kConfig.dq && !kConfig.dk) return;
    Scores dP;
    multiply_dout_v(dP, stage, row, column);
    if (careful) suspect = suspect || !all_finite(dP);
    if constexpr (kConfig.dropout) drop(dP, kept, static_cast<float>(head.dropout.kept_scale()));
    form_ds(dP, P, rows, careful);
    if constexpr (kConfig.softcap) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) dP[t][i] *= slope[t][i];
      }
    }
    share(dP, ds_tile(), row, column);
  }

  static void copy(Scores& to, const Scores& from) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) to[t][i] = from[t][i];
    }
  }

  // P as dV takes it, to shared memory. Bits of `kept`: what dropout left.
  template <i32 kWords>
  void share_p(const Scores& P, u32 (&kept)[kWords], const Rows& rows, const Terms& terms, i64 key,
               i32 row, i32 column) const {
    Scores taken;
    copy(taken, P);
    if constexpr (kConfig.split_sum) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) taken[t][i] *= rows[t][i / 2 % 2].share;
      }
    }
    if constexpr (kConfig.dropout) {
      Scores marks;
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) marks[t][i] = 1;
      }
      terms.drop(marks, key);
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) {
          const i32 at = t * kFloats + i;
          kept[at / 32] |= marks[t][i] != 0 ? 1u << at % 32 : 0u;
          taken[t][i] = marks[t][i] != 0 ? taken[t][i] : 0.f;
        }
      }
    }
    if constexpr (kConfig.dv) share(taken, p_tile(), row, column);
  }

  template <i32 kWords>
  static void drop(Scores& dP, const u32 (&kept)[kWords], float kept_scale) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const i32 at = t * kFloats + i;
        dP[t][i] = (kept[at / 32] >> at % 32 & 1u) != 0 ? dP[t][i] * kept_scale : 0.f;
      }
    }
  }

  // ---- 4 and 5: gradients ----------------------------------------------------------------------

  u32 kv_group() const { return warp % kConfig.kv_groups(); }
  u32 kv_part() const { return warp / kConfig.kv_groups(); }

  // sums += pairs^T tile, this warp's part of it.
  template <i32 kPartDims, i32 kDims>
  void add_columns(float (&sums)[kKvTiles][kPartDims / 2], const PairTile& pairs,
                   const SwizzledTile<kDims, kConfig.swizzle>& tile) const {
    const PartRow<kConfig.columns, kConfig.swizzle, kKvTiles> left(left_columns(pairs),
                                                                   kv_group() * kKvTiles);
    const PartRow<kDims, kConfig.swizzle, kPartDims / 16> right(right_columns(tile),
                                                                kv_part() * (kPartDims / 16));
    multiply_tiles<kConfig.dtype, kConfig.rows / 16>(
        sums, [&](i32 k, i32 t) { return ptx::ldmatrix_x4_trans(left.at(t, 16 * k)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4_trans(right.at(n, 16 * k)); });
  }

  // dQ = dS K, this warp's tiles, added to the sums.
  void add_dq(float* sums) const {
    constexpr i32 kAcross = kConfig.d_qk / kConfig.dq_dims;
    constexpr i32 kDqTiles = kConfig.dq_rows / 16;
#pragma unroll 1
    for (i32 tile = warp; tile < kConfig.dq_tiles(); tile += kConfig.warps) {
      const auto dS = left_rows(ds_tile(), tile / kAcross * kConfig.dq_rows);
      const PartRow<kConfig.d_qk, kConfig.swizzle, kConfig.dq_dims / 16> K(
          right_columns(k_tile()), tile % kAcross * (kConfig.dq_dims / 16));
      float dQ[kDqTiles][kConfig.dq_dims / 2];
      clear(dQ);
      multiply_tiles<kConfig.dtype, kConfig.columns / 16>(
          dQ, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(dS.at(k, 16 * t)); },
          [&](i32 k, i32 n) { return ptx::ldmatrix_x4_trans(K.at(n, 16 * k)); });
      using Order = Sm80DqOrder<kConfig>;
      float* const to = sums + Order::index(tile, 0, 0, static_cast<i32>(lane_index()));
#pragma unroll
      for (i32 t = 0; t < kDqTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kConfig.dq_dims / 2; i += 4) {
          const float (&x)[kConfig.dq_dims / 2] = dQ[t];
          float* const at = to + Order::index(0, t, i, 0);
          if constexpr (kConfig.wide_sums) {
            ptx::reduce_add_x4(at, x[i], x[i + 1], x[i + 2], x[i + 3]);
          } else {
#pragma unroll
            for (i32 e = 0; e < 4; ++e) ptx::reduce_add(at + 32 * e, x[i + e]);
          }
        }
      }
    }
  }

  // How many blocks of keys before this one add to a tile of queries.
  u32 turn_of(i64 block) const {
    const i64 own = first_key / kConfig.columns;
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
    return visible_row_blocks(p.mask_options, shape(),
                              {key, min<i64>(key + kConfig.columns, shape().kv_len)}, kConfig.rows);
  }

  void add_dq_of(i64 head, i64 block) const {
    const i64 number = tile_number(head, block);
    if constexpr (kConfig.ordered) {
      if (ptx::thread_index() == 0) ptx::await(params.turns + number, turn_of(block));
      ptx::block_sync();  // it is this block's turn
    }
    add_dq(params.dq_sums + number * kConfig.dq_elems());
    if constexpr (kConfig.ordered) {
      ptx::block_sync();  // all have added
      if (ptx::thread_index() == 0) ptx::announce(params.turns + number);
    }
  }

  // ---- The walk --------------------------------------------------------------------------------

  template <class FetchRows>
  void step(const HeadType& head, i64 block, i32 stage, const FetchRows& fetch_next_rows) {
    const bool is_full = kConfig.full_blocks && range.is_full(block);
#pragma unroll 1
    for (i32 tile = warp; tile < kConfig.s_tiles(); tile += kConfig.warps) {
      compute_pairs(head, block, is_full, stage, tile);
    }
    ptx::block_sync();  // P and dS are there; all are done with the rows
    fetch_next_rows();
    if (suspect) params.suspect_rows[tile_number(head.head, block)] = 1;
    if constexpr (kConfig.dv) {
      add_columns<kConfig.dv_dims()>(dV, p_tile(), dout_tile(stage));
    }
    if constexpr (kConfig.dk) add_columns<kConfig.dk_dims()>(dK, ds_tile(), q_tile(stage));
    if constexpr (kConfig.dq) add_dq_of(head.head, block);
  }

  void walk() {
    const i64 begin = range.visit.begin, end = range.visit.end;
    const i64 group = p.group_size();
    const i64 first_head = kv_head * group;
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
    if (first_key < shape().kv_len) {
      range = visited_by(first_key);
      if (range.visit.size() > 0) walk();
    }
    const float kept_scale = kConfig.dropout ? static_cast<float>(p.dropout.kept_scale()) : 1.f;
    if constexpr (kConfig.dk) {
      store<kConfig.dk_dims()>(dK, p.dk, p.dim_qk, static_cast<float>(p.score_map.scale));
    }
    if constexpr (kConfig.dv) store<kConfig.dv_dims()>(dV, p.dv, p.dim_v, kept_scale);
  }

  // This warp's part of dK or dV.
  template <i32 kPartDims>
  void store(float (&sums)[kKvTiles][kPartDims / 2], const ArrayView& array, i64 dim,
             float factor) const {
    const i64 first_dim = kv_part() * kPartDims;
    const i64 dims = min<i64>(dim - first_dim, kPartDims);
    if (dims <= 0 || !array.present()) return;
    const i64 row = first_key + kv_group() * kConfig.kv_rows + lane_index() / 4;
    const i64 offset = array.offset(sequence.batch, kv_head, sequence.kv_begin + row, first_dim);
    const bool in_units = array.dtype == kConfig.dtype && array.strides[3] == 1 &&
                          array.strides[2] % 8 == 0 && dims % 8 == 0 &&
                          reinterpret_cast<u64>(array.data + offset * 2) % 16 == 0;
#pragma unroll
    for (i32 t = 0; t < kKvTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i64 key = row + 16 * t + 8 * h;
        const bool counts = key < shape().kv_len;
        const i64 at = offset + (16 * t + 8 * h) * array.strides[2];
#pragma unroll
        for (i32 i = 2 * h; i < kPartDims / 2; i += 4) {
          sums[t][i] = counts ? sums[t][i] * factor : 0.f;
          sums[t][i + 1] = counts ? sums[t][i + 1] * factor : 0.f;
        }
        if (in_units) {
          store_output_row<kConfig.dtype>(sums[t], h, reinterpret_cast<u16*>(array.data) + at,
                                          key < sequence.kv_slot, static_cast<i32>(dims));
        } else if (key < sequence.kv_slot) {
          store_numbers<kPartDims>(sums[t], h, array, at, dims);
        }
      }
    }
  }

  // Any dtype, stride and alignment: number by number, in a loop that is not unrolled and therefore
  // reads them from memory.
  template <i32 kPartDims>
  static void store_numbers(const float (&tile)[kPartDims / 2], i32 h, const ArrayView& array,
                            i64 offset, i64 dims) {
    float numbers[kPartDims / 4];
#pragma unroll
    for (i32 at = 0; at < kPartDims / 4; ++at) numbers[at] = tile[at / 2 * 4 + 2 * h + at % 2];
#pragma unroll 1
    for (i32 at = 0; at < kPartDims / 4; ++at) {
      const i64 d = Terms::column(at / 2 * 4) + at % 2;
      if (d < dims) store_real(array, offset + d * array.strides[3], numbers[at]);
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
  if (keys.suspect) {
    params.suspect_keys[(task.batch * p.heads_kv + task.head) * num_slots + task.slot] = 1;
  }
}

}  // namespace fulmen
