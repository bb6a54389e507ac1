// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The warps of mla_few_rows that multiply: S = Q K^T, each warp 32 keys over a quarter of the dims;
// the softmax, two rows each; O += P V, 64 dims each.
#pragma once

#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/mla_sm90/few_rows_config.h"
#include "kernels/mla_sm90/queries.cuh"
#include "kernels/ptx/mma.cuh"

namespace fulmen {

template <MlaFewRowsConfig kConfig>
struct MlaFewRowsProducts {
  static constexpr DecodeSm80Config kSchedule = kConfig.common.schedule;
  static constexpr DType kDType = kSchedule.product_dtype();
  using Config = MlaFewRowsConfig;
  using Tile = RowTile<kSchedule>;
  static constexpr i32 kRows = Config::kWarpRows;

  const MlaSm90Arguments& arguments;
  MlaFewRowsStorage<kConfig> shared;
  i32 warp;
  i32 lane;

  // Of the rows that this warp has P of. unit: what 1 of Q counts; sum: of this lane's keys.
  float unit[kRows], maximum[kRows], sum[kRows];
  // Of this warp's dims, all rows.
  float O[Config::kWarpDims / 8][4];

  void run(const Tile& tile, i32 num_blocks) {
    load_q(tile);
    sync();  // warps -> Q
#pragma unroll 1
    for (i32 block = 0; block < num_blocks; ++block) {
      const i32 buffer = block % Config::kBuffers;
      ptx::bar_sync(shared.full(buffer), shared.kTogether);
      multiply_q_k(buffer);
      sync();  // warps -> scores of quarters
      softmax(buffer);
      sync();  // warps -> rows of P
      multiply_p_v(buffer);
      if (block + Config::kBuffers < num_blocks) {
        ptx::bar_arrive(shared.empty(buffer), shared.kTogether);
      }
    }
    leave();
  }

 private:
  void sync() const { ptx::bar_sync(shared.kMultiplying, 32 * Config::kWarps); }
  i32 row_of(i32 i) const { return warp + i * Config::kWarps; }

  // Rows of Q, as float16 in units of their own.
  void load_q(const Tile& tile) {
    constexpr i32 kVectors = kConfig.dims() / 8, kTurns = (kVectors + 31) / 32;
    const AttentionParams& p = arguments.attention;
    ptx::U32x4 x[kRows][kTurns];
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
      const bool counts = tile.counts(row_of(i));
      const u16* const from =
          reinterpret_cast<const u16*>(p.q.data) + (counts ? tile.offset(p.q, row_of(i), 0) : 0);
#pragma unroll
      for (i32 n = 0; n < kTurns; ++n) {
        const i32 vector = lane + 32 * n;
        x[i][n] = counts && vector < kVectors ? ptx::load_global_x4(from + vector * 8)
                                              : ptx::U32x4{{0, 0, 0, 0}};
      }
    }
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
      maximum[i] = -kInfinity<float>;
      sum[i] = 0;
      u32 top = 0;
#pragma unroll
      for (i32 n = 0; n < kTurns; ++n) top = max(top, largest_of(x[i][n]));
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) top = max(top, ptx::shuffle_xor(top, step));
      unit[i] = unit_of_largest(top);
      const float factor = inverse_of_power(unit[i]);
#pragma unroll
      for (i32 n = 0; n < kTurns; ++n) {
        const i32 vector = lane + 32 * n;
        if (vector >= kVectors) continue;
        const u32 to = shared.q(row_of(i)) + static_cast<u32>(Config::unit_of(vector)) * 16;
        ptx::store_shared_x4(to, n < 2 ? scaled<kSchedule.dtype, kDType>(x[i][n], factor)
                                       : scaled<kSchedule.dtype, kSchedule.dtype>(x[i][n], factor));
      }
    }
#pragma unroll
    for (i32 f = 0; f < Config::kWarpDims / 2; ++f) O[f / 4][f % 4] = 0;
  }

  void multiply_q_k(i32 buffer) const {
    constexpr i32 kSteps = kConfig.dims() / 16 / Config::kQuarters;
    constexpr i32 kTiles = Config::kScoreKeys / 8, kOthers = Config::kWarps / Config::kQuarters;
    const i32 quarter = warp / kOthers, first_key = warp % kOthers * Config::kScoreKeys;
    const u32 column = static_cast<u32>(quarter * kSteps) * 32;
    const u32 q = shared.q(lane % 16) + column + static_cast<u32>(lane) / 16 * 16;
    const u32 k = shared.key(buffer, first_key + lane % 8 + lane / 16 * 8) + column +
                  static_cast<u32>(lane) / 8 % 2 * 16;
    float S[kTiles][4]{};
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const ptx::U32x4 a = ptx::ldmatrix_x4(q + step * 32);
      const bool is_ninth = kConfig.dims() > 512 && quarter * kSteps + step >= 512 / 16;
#pragma unroll
      for (i32 n = 0; n < kTiles; n += 2) {
        const ptx::U32x4 b = ptx::ldmatrix_x4(k + n * 8 * kConfig.row_bytes() + step * 32);
        if (is_ninth) {
          multiply<kSchedule.dtype>(S + n, a, b);
        } else {
          multiply<kDType>(S + n, a, b);
        }
      }
    }
#pragma unroll
    for (i32 n = 0; n < kTiles; ++n) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        store_pair(shared.score(quarter, lane / 4 + 8 * h, first_key + 8 * n + lane % 4 * 2),
                   S[n][2 * h], S[n][2 * h + 1]);
      }
    }
  }

  // 16 rows, twice 8 columns.
  template <DType kType>
  static void multiply(float (*d)[4], const ptx::U32x4& a, const ptx::U32x4& b) {
    ptx::mma_m16n8k16<kType>(d[0], a.word, b.word[0], b.word[1]);
    ptx::mma_m16n8k16<kType>(d[1], a.word, b.word[2], b.word[3]);
  }
  static void store_pair(u32 at, float x, float y) {
    ptx::store_shared_x2(at, {{__builtin_bit_cast(u32, x), __builtin_bit_cast(u32, y)}});
  }

  // P = exp(S - maximum) times 2^weight_log2: a lane has two keys of each row.
  void softmax(i32 buffer) {
    static_assert(Config::kKeys == 64);
    constexpr float kWeight = kSchedule.weight_log2();
    const float log2s = arguments.unit.log2s;
    const i32 key = 2 * lane;
    const u32 missing = ptx::load_shared(shared.missing(buffer, key / Config::kWarpKeys)) >>
                        key % Config::kWarpKeys;
    float x[kRows][2], top[kRows];
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
      x[i][0] = x[i][1] = 0;
#pragma unroll
      for (i32 quarter = 0; quarter < Config::kQuarters; ++quarter) {
        const ptx::F32x2 s = ptx::load_shared_f32x2(shared.score(quarter, row_of(i), key));
        x[i][0] += s.word[0];
        x[i][1] += s.word[1];
      }
#pragma unroll
      for (i32 k = 0; k < 2; ++k) {
        x[i][k] = (missing >> k & 1) != 0 ? -kInfinity<float> : x[i][k] * unit[i];
      }
      top[i] = ptx::max(x[i][0], x[i][1]);
    }
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
#pragma unroll
      for (i32 i = 0; i < kRows; ++i) top[i] = ptx::max(top[i], ptx::shuffle_xor(top[i], step));
    }
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
      const float now = ptx::max(maximum[i], top[i]);
      const float shift = now == -kInfinity<float> ? 0.f : now;
      const float factor = ptx::exp2((maximum[i] - shift) * log2s);
      maximum[i] = now;
      const float first = ptx::exp2((x[i][0] - shift) * log2s + kWeight);
      const float second = ptx::exp2((x[i][1] - shift) * log2s + kWeight);
      sum[i] = sum[i] * factor + first + second;
      if (lane == 0) ptx::store_shared(shared.factor(row_of(i)), __builtin_bit_cast(u32, factor));
      ptx::store_shared(shared.p(row_of(i)) + static_cast<u32>(key) * 2,
                        ptx::pack<kDType>(first, second));
    }
  }

  // O = O factor + P V.
  void multiply_p_v(i32 buffer) {
    float factor[2];
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      factor[h] = __builtin_bit_cast(float, ptx::load_shared(shared.factor(lane / 4 + 8 * h)));
    }
#pragma unroll
    for (i32 f = 0; f < Config::kWarpDims / 2; ++f) O[f / 4][f % 4] *= factor[f / 2 % 2];
    const u32 weights = shared.p(lane % 16) + static_cast<u32>(lane) / 16 * 16;
    const u32 v = shared.key(buffer, lane % 16) + static_cast<u32>(warp * Config::kWarpDims) * 2 +
                  static_cast<u32>(lane) / 16 * 16;
#pragma unroll
    for (i32 k = 0; k < Config::kKeys; k += 16) {
      const ptx::U32x4 a = ptx::ldmatrix_x4(weights + k * 2);
#pragma unroll
      for (i32 n = 0; n < Config::kWarpDims / 8; n += 2) {
        multiply<kDType>(O + n, a, ptx::ldmatrix_x4_trans(v + k * kConfig.row_bytes() + n * 16));
      }
    }
  }

  // What blocks add up.
  void leave() {
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) sum[i] += ptx::shuffle_xor(sum[i], step);
      if (lane == 0) store_pair(shared.state(row_of(i)), maximum[i], sum[i]);
    }
#pragma unroll
    for (i32 n = 0; n < Config::kWarpDims / 8; ++n) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        store_pair(shared.sum(lane / 4 + 8 * h, warp * Config::kWarpDims + 8 * n + lane % 4 * 2),
                   O[n][2 * h], O[n][2 * h + 1]);
      }
    }
  }
};

}  // namespace fulmen
