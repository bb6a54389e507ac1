// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two warpgroups of mla_sm90. Each makes the scores of its half of a block of keys, and the sum
// over all keys of its half of the dims of the values: O of 64 rows and 512 dims does not fit the
// registers of one. So P of each half goes to both, to its own warpgroup in registers and to the
// other through shared memory. The two take turns ("seesaw": FlashMLA, DeepSeek, 2025): a
// warpgroup's softmax runs under its product with the other's P and under the other's products.
//
// The reference of P, what its exponents are relative to, never decreases along the order half 0,
// half 1, half 0 of the next block ...: each warpgroup takes over the other's before it makes its
// own, and multiplies what it has summed when a reference grew (fewer than once in many blocks:
// references follow a maximum only when it grew by more than 2^8).
#pragma once

#include "kernels/common/accurate_math.cuh"
#include "kernels/decode_sm80/operands.cuh"
#include "kernels/mla_sm90/storage.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct MlaConsumer {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  static constexpr DType kDType = kSchedule.dtype;
  static constexpr i32 kFloats = MlaSm90Config::kHalfDims / 2;
  using Scores = float[MlaSm90Config::kKeys / 2];
  using Tile = RowTile<kSchedule>;

  // Of K, before the product with the other's P: the last, and those of this warpgroup's dims.
  static constexpr i32 kFirstTiles = 1 + MlaSm90Config::kHalfTiles;

  // Named barriers: P of a half is there, for both warpgroups; both have come; those of one have.
  static constexpr u32 kPublished = 1;
  static constexpr u32 kBoth = 3;
  static constexpr u32 kWarpgroup = 4;

  const AttentionParams& p;
  MlaStorage shared;
  i32 half;    // of keys and of dims
  u32 thread;  // 0 .. 127
  float log2s;
  u32 phase = 0;  // of the barriers of keys

  float O[kFloats];
  float maximum[2], sum[2];  // of this thread's two rows; sum: of this thread's keys of its half
  Keys visible[2];
  Keys full;  // keys that all rows of the tile see
  i32 kv_len;

  i32 row_of(i32 h) const { return static_cast<i32>(thread / 32 * 16 + thread % 32 / 4) + 8 * h; }
  void sync_warpgroup() const { ptx::bar_sync(kWarpgroup + static_cast<u32>(half), 128); }
  static void sync_both() { ptx::bar_sync(kBoth, 256); }

  void start(const Tile& tile) {
    const SequenceShape& shape = tile.sequence.shape;
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) O[f] = 0;
    kv_len = shape.kv_len;
    const i32 last = min(tile.query_of(tile.num_rows() - 1), shape.q_len - 1);
    full = seen_keys<kSchedule>(p, tile.sequence, tile.query_of(0), last).all;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = row_of(h);
      const bool counts = tile.counts(row);
      maximum[h] = -kInfinity<float>;
      sum[h] = 0;
      visible[h] = {0, counts ? kv_len : 0};
      if (kSchedule.score.mask_kind != MaskKind::kNone && counts) {
        visible[h] = keys_seen_by<kSchedule>(p, tile.sequence, tile.query_of(row));
      }
    }
    load_q(tile);
  }

  // Half 0 of the first block of a row tile: nothing of the other is there yet.
  void begin(i32 first) {
    Scores S;
    issue_scores<0, kFirstTiles>(S);
    issue_scores<kFirstTiles, MlaSm90Config::kTiles>(S);
    ptx::wgmma_wait<0>();
    finish(S, first);
  }

  // A half of a block, from key `first` on. The product with the other's P comes as soon as its
  // own tiles of K are done with: what it frees is what the other needs to end its next scores.
  void step(i32 first) {
    Scores S;
    issue_scores<0, kFirstTiles>(S);
    multiply_other();
    issue_scores<kFirstTiles, MlaSm90Config::kTiles>(S);
    ptx::wgmma_wait<1>();
    release(1 - half, half);
    ptx::wgmma_wait<0>();
    finish(S, first);
  }

  // P of half 1 of the last block.
  void end() {
    multiply_other();
    ptx::wgmma_wait<0>();
    release(1 - half, half);
  }

  void release(i32 of_half, i32 group) const {
    if (lane_index() == 0) ptx::mbarrier_arrive(shared.empty(of_half, group));
  }

 private:
  // Q of a row tile, a row by a warp: zeros where there are none.
  void load_q(const Tile& tile) const {
    constexpr i32 kVectors = MlaSm90Config::kDims / 8;
    constexpr i32 kEach = ceil_div(kVectors, 32);  // of a lane
    constexpr i32 kRows = 4;                       // at once
    const i32 lane = static_cast<i32>(lane_index());
    const i32 first = 8 * (4 * half + static_cast<i32>(thread / 32));
#pragma unroll 1
    for (i32 row = first; row < first + 8; row += kRows) {
      ptx::U32x4 x[kRows][kEach];
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const bool counts = tile.counts(row + r);
        const u8* const from = p.q.data + (counts ? tile.offset(p.q, row + r, 0) * 2 : 0);
#pragma unroll
        for (i32 i = 0; i < kEach; ++i) {
          x[r][i] = {{0, 0, 0, 0}};
          const i32 unit = lane + 32 * i;
          if (counts && unit < kVectors) {
            x[r][i] = *reinterpret_cast<const ptx::U32x4*>(from + unit * 16);
          }
        }
      }
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
        for (i32 i = 0; i < kEach; ++i) {
          const i32 unit = lane + 32 * i;
          if (unit >= kVectors) continue;
          ptx::store_shared_x4(
              shared.q(unit / 8).unit(static_cast<u32>(row + r), static_cast<u32>(unit % 8)),
              x[r][i]);
        }
      }
    }
    ptx::fence_proxy_async();
    sync_both();
  }

  // S (+)= Q K^T over some tiles of K, as they land.
  template <i32 kBegin, i32 kEnd>
  void issue_scores(Scores& S) const {
    ptx::wgmma_fence();
#pragma unroll
    for (i32 n = kBegin; n < kEnd; ++n) {
      const i32 tile = MlaStorage::tile_at(half, n);
      ptx::mbarrier_wait(shared.full(half, tile), phase);
      const MlaTile Q = shared.q(tile), K = shared.keys(half, tile);
      ptx::wgmma_fence();
#pragma unroll
      for (i32 k = 0; k < MlaSm90Config::kColumns / 16; ++k) {
        ptx::wgmma_ss<kDType, false>(S, Q.rows(k), K.rows(k), n > 0 || k > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // O += P V with P of the other's half, which was published, and its reference taken over.
  void multiply_other() {
    ptx::bar_sync(kPublished + 1 - half, 256);
    const ptx::U32x4 grew = ptx::load_shared_x4(shared.grew(1 - half));
    if ((grew.word[0] | grew.word[1] | grew.word[2] | grew.word[3]) != 0) {
      ptx::wgmma_wait<0>();  // whose wait would else be everywhere (the assembler's C7517)
      const float before[2] = {maximum[0], maximum[1]};
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        maximum[h] = __builtin_bit_cast(float, ptx::load_shared(shared.reference(row_of(h))));
        sum[h] *= factor(before[h], maximum[h]);
      }
      follow(before);
    }
    const MlaTile P = shared.p(), V = shared.keys(1 - half, half * MlaSm90Config::kHalfTiles);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 k = 0; k < MlaSm90Config::kKeys / 16; ++k) {
      ptx::wgmma_ss<kDType, true>(O, P.rows(k), V.columns(k), true);
    }
    ptx::wgmma_commit();
  }

  // P of the scores, for the other, and O += P V with it.
  void finish(Scores& S, i32 first) {
    const float before[2] = {maximum[0], maximum[1]};
    release(half, 2);
    clear_tail(first);
    softmax(S, first);
    const bool grew = follow(before);
    u32 P[MlaSm90Config::kKeys / 4];
#pragma unroll
    for (i32 i = 0; i < MlaSm90Config::kKeys / 4; ++i) {
      P[i] = ptx::pack<kDType>(S[2 * i], S[2 * i + 1]);
    }
    publish(P, grew);
    const MlaTile V = shared.keys(half, half * MlaSm90Config::kHalfTiles);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 k = 0; k < MlaSm90Config::kKeys / 16; ++k) {
      const u32* const a = P + 4 * k;
      ptx::wgmma_rs<kDType, true>(O, a[0], a[1], a[2], a[3], V.columns(k), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    release(half, half);
    phase ^= 1;
  }

  void publish(const u32 (&P)[MlaSm90Config::kKeys / 4], bool grew) const {
#pragma unroll
    for (i32 k = 0; k < MlaSm90Config::kKeys / 16; ++k) {
      const u32 row = thread / 32 * 16 + thread % 16;
      ptx::stmatrix_x4(shared.p().unit(row, static_cast<u32>(2 * k) + thread % 32 / 16),
                       {{P[4 * k], P[4 * k + 1], P[4 * k + 2], P[4 * k + 3]}});
    }
    ptx::warp_sync();  // lanes have read the other's reference
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (thread % 4 == 0) {
        ptx::store_shared(shared.reference(row_of(h)), __builtin_bit_cast(u32, maximum[h]));
      }
    }
    if (lane_index() == 0) ptx::store_shared(shared.grew(half) + thread / 32 * 4, grew);
    ptx::fence_proxy_async();
    ptx::bar_arrive(kPublished + half, 256);
  }

  // Rows of the half past the sequence's end become 0: a probability of 0 times whatever lies
  // there could be NaN.
  void clear_tail(i32 first) const {
    const i32 rows = kv_len - first;
    if (rows >= MlaSm90Config::kKeys || rows <= 0) return;
    sync_warpgroup();  // all warps have read K
#pragma unroll 1
    for (u32 at = static_cast<u32>(rows) * 8 + thread; at < MlaSm90Config::kKeys * 8; at += 128) {
#pragma unroll
      for (i32 tile = 0; tile < 2 * MlaSm90Config::kHalfTiles; ++tile) {
        ptx::store_shared_x4(shared.keys(half, tile).unit(at / 8, at % 8), {{0, 0, 0, 0}});
      }
    }
    ptx::fence_proxy_async();
    sync_warpgroup();
  }

  // S becomes exp(S - maximum), of the keys from `first` on.
  void softmax(Scores& S, i32 first) {
    if (first < full.begin || full.end < first + MlaSm90Config::kKeys) hide(S, first);
    float top[2];
    float grown = -kInfinity<float>;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      top[h] = S[2 * h];
#pragma unroll
      for (i32 f = 2 * h; f < MlaSm90Config::kKeys / 2; f += 4) {
        top[h] = ptx::max(top[h], ptx::max(S[f], S[f + 1]));
      }
      grown = ptx::max(grown, top[h] - maximum[h]);
    }
    if (ptx::any(grown * log2s > 8)) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        top[h] = ptx::max(top[h], ptx::shuffle_xor(top[h], 1));
        top[h] = ptx::max(top[h], ptx::shuffle_xor(top[h], 2));
        const float now = ptx::max(maximum[h], top[h]);
        sum[h] *= factor(maximum[h], now);
        maximum[h] = now;
      }
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float shift = maximum[h] == -kInfinity<float> ? 0.f : maximum[h];
      float weights = 0;
#pragma unroll
      for (i32 f = 2 * h; f < MlaSm90Config::kKeys / 2; f += 4) {
        S[f] = ptx::exp2((S[f] - shift) * log2s);
        S[f + 1] = ptx::exp2((S[f + 1] - shift) * log2s);
        weights += S[f] + S[f + 1];
      }
      sum[h] += weights;
    }
  }

  void hide(Scores& S, i32 first) const {
#pragma unroll
    for (i32 f = 0; f < MlaSm90Config::kKeys / 2; ++f) {
      const i32 column = first + f / 4 * 8 + 2 * static_cast<i32>(thread % 4) + f % 2;
      if (!visible[f / 2 % 2].contains(column)) S[f] = -kInfinity<float>;
    }
  }

  float factor(float before, float now) const {
    if (before == now) return 1;
    return before == -kInfinity<float> ? 0.f : ptx::exp2((before - now) * log2s);
  }
  // O becomes relative to `maximum`, of all rows of a warp; whether some of them grew.
  bool follow(const float (&before)[2]) {
    if (!ptx::any(before[0] != maximum[0] || before[1] != maximum[1])) return false;
    const float factors[2] = {factor(before[0], maximum[0]), factor(before[1], maximum[1])};
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) O[f] *= factors[f / 2 % 2];
    return true;
  }
};

}  // namespace fulmen
