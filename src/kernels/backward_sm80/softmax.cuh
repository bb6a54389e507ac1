// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// P = exp(S - LSE) and dS = P (dP - D) of a warp's tile in registers, from the two products and the
// rows' statistics; and rounded, to and from shared memory. Called by pairs.cuh.
#pragma once

#include "kernels/backward_sm80/mask.cuh"

namespace fulmen {

// S = Q K^T or dP = dO V^T of wide heads by the warps of a group together: each multiplies a slice
// of the dims for the whole block and sends the partial sums to the warps that own the tiles,
// through shared memory. So a fragment is read once for two row tiles and two column tiles, not
// once for each tile, and eight sums run side by side instead of two.
template <BackwardSm80Config kConfig>
struct SplitDProductSm80 {
  using Storage = BackwardStorageSm80<kConfig>;
  using Products = typename Storage::Products;
  using Scores = typename BackwardStepSm80<kConfig>::Scores;  // a part, 16 x 16
  static constexpr i32 kGroupWarps = kConfig.group_warps();
  static constexpr i32 kAcross = kConfig.kv_rows / 16;  // parts side by side
  static constexpr u32 kSlotBytes = 32 * 32;            // of a part: 8 floats a lane
  using Sums = float[kConfig.q_rows / 16][kConfig.kv_rows / 2];

  Storage storage;

  // S = this warp's part of queries keys^T. All warps of the group together.
  template <i32 kDims, class Tile>
  void multiply(Scores& S, const Tile& queries, const Tile& keys) const {
    Sums sums;
    multiply_slice<kDims>(sums, queries, keys);
    send_partial_sums(S[0], sums);
    storage.group_sync();  // all warps of the group -> partial sums
    add_partial_sums(S[0]);
  }

 private:
  template <i32 kDims, class Tile>
  void multiply_slice(Sums& sums, const Tile& queries, const Tile& keys) const {
    constexpr i32 kSliceDims = kDims / kGroupWarps;
    using Way = PartRow<kDims, kConfig.swizzle, kSliceDims / 16>;
    const u32 first = storage.warp_in_group() * (kSliceDims / 16);
    const Way left(left_rows(queries, 0), first), right(right_rows(keys), first);
    Products::template set_scores<kSliceDims>(
        sums, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(left.at(k, 16 * t)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
  }

  // Where the lane's sums for a part lie: slot `slot` of those of the other warps.
  u32 slot_address(u32 part, u32 slot) const {
    return storage.slices() + (part * (kGroupWarps - 1) + slot) * kSlotBytes + lane_index() * 16;
  }

  void send_partial_sums(float (&S)[8], const Sums& sums) const {
    const u32 own = storage.warp_in_group();
#pragma unroll
    for (u32 part = 0; part < kGroupWarps; ++part) {
      const float* const x = &sums[part / kAcross][part % kAcross * 8];
      if (part == own) {
#pragma unroll
        for (i32 i = 0; i < 8; ++i) S[i] = x[i];
      } else {
        const u32 to = slot_address(part, own < part ? own : own - 1);
        store(to, x);
        store(to + kSlotBytes / 2, x + 4);
      }
    }
  }
  void add_partial_sums(float (&S)[8]) const {
#pragma unroll
    for (u32 slot = 0; slot < kGroupWarps - 1; ++slot) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const ptx::U32x4 x = ptx::load_shared_x4(slot_address(storage.warp_in_group(), slot) +
                                                 half * (kSlotBytes / 2));
#pragma unroll
        for (u32 e = 0; e < 4; ++e) S[4 * half + e] += __builtin_bit_cast(float, x.word[e]);
      }
    }
  }

  static void store(u32 to, const float* x) {
    ptx::U32x4 words;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) words.word[e] = __builtin_bit_cast(u32, x[e]);
    ptx::store_shared_x4(to, words);
  }
};

// P of a hidden pair, where dbias asks for it.
inline constexpr float kHiddenWeight = -0.f;
inline bool is_hidden_weight(float P) {
  return __builtin_bit_cast(u32, P) == __builtin_bit_cast(u32, kHiddenWeight);
}

template <BackwardSm80Config kConfig>
struct BackwardSoftmaxSm80 {
  using Tiles = BackwardStorageSm80<kConfig>;
  using PairTile = typename Tiles::PairTile;
  using Products = typename Tiles::Products;
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;
  using Fragments = typename Step::Fragments;
  using Scores = typename Step::Scores;
  static constexpr i32 kTiles = Step::kTiles;
  static constexpr i32 kFloats = Step::kFloats;
  using Rows = RowStatsSm80[2];  // of 16 rows, the thread's two

  const AttentionParams& p;
  Tiles storage;

  // S = Q K^T
  void multiply_q_k(Scores& S, const Step& step, const Part& part) const {
    multiply<kConfig.d_qk>(S, storage.q_tile(step.stage), storage.k_tile(), part);
  }
  // dP = dO V^T
  void multiply_dout_v(Scores& dP, const Step& step, const Part& part) const {
    multiply<kConfig.d_v>(dP, storage.dout_tile(step.stage), storage.v_tile(), part);
  }

  void read_rows(Rows& rows, const Step& step, const Part& part, i32 t) const {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const ptx::U32x4 x =
          ptx::load_shared_x4(storage.rows_at(step.stage) + (part.row + Fragments::row(t, h)) * 16);
      rows[h] = {__builtin_bit_cast(float, x.word[0]), __builtin_bit_cast(float, x.word[1]),
                 __builtin_bit_cast(float, x.word[2]), __builtin_bit_cast(float, x.word[3])};
    }
  }

  // S = P, 0 where hidden. In nats where config.scales_scores says so, else scaled here.
  // has_moderate_max: see BackwardMaskSm80.
  void to_probabilities(Scores& S, const Step& step, const Part& part,
                        bool has_moderate_max) const {
    const double scale = kConfig.scales_scores() ? 1 : p.score_map.scale;
    const float scale_nats = static_cast<float>(scale);
    const float scale_log2 = static_cast<float>(scale * kLog2E<double>);
    if (has_moderate_max) {
      exponentiate(S, step, part, [&](float s, const RowStatsSm80& row) {
        return ptx::fma(s, scale_log2, -ptx::fma(row.row_max, kLog2E<float>, row.sum_log2));
      });
    } else {
      exponentiate(S, step, part, [&](float s, const RowStatsSm80& row) {
        const float below = ptx::max(row.row_max - ptx::mul(s, scale_nats), 0.f);
        return ptx::fma(-below, kLog2E<float>, -row.sum_log2);
      });
    }
  }

  // dP = dS = P (share dP + offset)
  static void form_ds(float (&dP)[kFloats], const float (&P)[kFloats], const Rows& rows) {
    constexpr float kToDs = kConfig.p_to_ds();
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) {
      const RowStatsSm80& row = rows[i / 2 % 2];
      if constexpr (kConfig.split_sum) {
        dP[i] = P[i] * ptx::fma(row.share * kToDs, dP[i], row.offset * kToDs);
      } else if constexpr (kToDs != 1) {
        dP[i] = P[i] * ptx::fma(kToDs, dP[i], row.offset * kToDs);
      } else {
        dP[i] = P[i] * (dP[i] + row.offset);
      }
    }
  }
  void form_ds(Scores& dP, const Scores& P, const Step& step, const Part& part) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      Rows rows;
      read_rows(rows, step, part, t);
      form_ds(dP[t], P[t], rows);
    }
  }
  // The same with P as it is in shared memory, rounded.
  void form_ds_of_shared(Scores& dP, const Step& step, const Part& part) const {
    const auto from = way_to(storage.p_tile(), part);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      Rows rows;
      read_rows(rows, step, part, t);
      float P[kFloats];
#pragma unroll
      for (i32 j = 0; j < kSteps; ++j) {
        Products::numbers(ptx::ldmatrix_x4(from.at(j, 16 * t)), &P[kFloats / kSteps * j]);
      }
      form_ds(dP[t], P, rows);
    }
  }

  // A warp's tile of P or dS, rounded, to shared memory.
  static void share(const Scores& S, const PairTile& tile, const Part& part) {
    const auto to = way_to(tile, part);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 j = 0; j < kSteps; ++j) {
        const ptx::U32x4 x = Products::words(&S[t][kFloats / kSteps * j]);
        if constexpr (kConfig.hopper) {
          ptx::stmatrix_x4(to.at(j, 16 * t), x);
        } else {
#pragma unroll
          for (i32 w = 0; w < 4; ++w) {
            const u32 row = part.row + Fragments::row(t, w % 2);
            const u32 vector = 2 * (part.column / Products::kStep + j) + w / 2;
            ptx::store_shared(tile.address(row, vector) + lane_index() % 4 * 4, x.word[w]);
          }
        }
      }
    }
  }

 private:
  template <i32 kDims, class Tile>
  void multiply(Scores& S, const Tile& queries, const Tile& keys, const Part& part) const {
    if constexpr (kConfig.split_d) {
      SplitDProductSm80<kConfig>{storage}.template multiply<kDims>(S, queries, keys);
    } else {
      const auto left = left_rows(queries, part.row);
      auto right = right_rows(keys);
      right.start = right.at(0, part.column);
      Products::template set_scores<kDims>(
          S, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(left.at(k, 16 * t)); },
          [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
    }
  }

  template <class Exponent>
  void exponentiate(Scores& S, const Step& step, const Part& part, const Exponent& exponent) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      Rows rows;
      read_rows(rows, step, part, t);
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        float& s = S[t][i];
        const bool hidden = kConfig.dbias && s == -kInfinity<float>;  // also in a row of NaN
        s = hidden ? kHiddenWeight : ptx::exp2(exponent(s, rows[i / 2 % 2]));
      }
    }
  }

  // A lane's way through a part of P or dS, 16 rows and a step of columns at a time.
  static constexpr i32 kSteps = kConfig.s_columns / Products::kStep;
  static auto way_to(const PairTile& tile, const Part& part) {
    return PartRow<kConfig.words(kConfig.kv_rows), kConfig.swizzle, kSteps>(
        left_rows(tile, part.row), part.column / Products::kStep);
  }
};

}  // namespace fulmen
