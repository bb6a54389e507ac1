// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The warpgroup of mla_sm90 that makes scores and P: S = Q K^T with Q in registers, but for its
// last 64 columns; the softmax; P, which two other warpgroups multiply by values.
//
// P of a block is announced when most of the products of the next block's scores are done: the
// tensor cores then have P's product to do while this warpgroup is at the next softmax.
//
// What P's exponents are relative to follows the maximum of a row only when it grew by more than
// 2^8 (fewer than once in many blocks); whoever sums values multiplies what it has by the factor.
#pragma once

#include "kernels/common/accurate_math.cuh"
#include "kernels/decode_sm80/operands.cuh"
#include "kernels/mla_sm90/epilogue.cuh"
#include "kernels/mla_sm90/queries.cuh"
#include "kernels/mla_sm90/storage.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct MlaScores {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  static constexpr DType kDType = kSchedule.product_dtype();
  static constexpr DType kNinthDType = kSchedule.dtype;  // of the columns that are no values
  static constexpr bool kMasked = kSchedule.score.mask_kind != MaskKind::kNone;
  using Config = MlaSm90Config;
  using Scores = float[kConfig.keys() / 2];
  using Tile = RowTile<kSchedule>;
  static constexpr u32 kBarrier = 1;     // named
  static constexpr i32 kEarlyTiles = 6;  // whose products are done when the last P is announced
  static constexpr i32 kWords = Config::kColumns / 4;  // of a tile of Q, of a thread

  const MlaSm90Arguments& arguments;
  MlaStorage<kConfig> shared;
  i32 row_tile;
  i32 worker;
  u32 thread;  // 0 .. 127
  const AttentionParams& p = arguments.attention;

  PipelineState<kConfig.stages()> keys{};     // whose scores are made next
  PipelineState<kConfig.stages()> weighed{};  // and P
  PipelineState<Config::kPBuffers> of_p{};
  u32 ends_phase = 0;
  u32 Q[kConfig.register_tiles()][kWords];
  // Of this thread's two rows. unit: what 1 of Q counts, a power of two; log2s: of scores, which
  // have that unit, as maximum has; sum: of this thread's keys.
  float unit[2], log2s[2], maximum[2], sum[2];
  Keys full{};          // keys that all rows of the tile see
  bool misses = false;  // a key of this thread should be there and is not

  i32 row_of(i32 h) const { return static_cast<i32>(thread / 32 * 16 + thread % 32 / 4) + 8 * h; }
  static void sync() { ptx::bar_sync(kBarrier, 128); }

  void run() {
    for (u32 count = 0;; ++count) {
      const MlaTask task = shared.load_task(count);
      const Tile tile = tile_of<kConfig>(arguments, row_tile, task);
      start(tile);
      attend(task, count);
      finish(tile, task, count);
      if (task.is_last) break;
    }
  }

 private:
  void start(const Tile& tile) {
    misses = false;
    const SequenceShape& shape = tile.sequence.shape;
    const i32 last = min(tile.query_of(tile.num_rows() - 1), shape.q_len - 1);
    full = seen_keys<kSchedule>(p, tile.sequence, tile.query_of(0), last).all;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = row_of(h);
      maximum[h] = -kInfinity<float>;
      sum[h] = 0;
      if constexpr (kMasked) {
        Keys visible{0, 0};
        if (tile.counts(row)) {
          visible = keys_seen_by<kSchedule>(p, tile.sequence, tile.query_of(row));
        }
        if (thread % 4 == 0) {
          ptx::store_shared_x2(shared.visible(row),
                               {{static_cast<u32>(visible.begin), static_cast<u32>(visible.end)}});
        }
      }
    }
    load_q(tile);
  }

  // Of four lanes, which share two rows, each loads every fourth vector of 8 columns; as operands
  // they have the same words of all of them.
  void load_q(const Tile& tile) {
    const u32 quad_lane = thread % 4;
    const u16* from[2];
    bool counts[2];
    float factor[2] = {1, 1};
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      counts[h] = tile.counts(row_of(h));
      from[h] = reinterpret_cast<const u16*>(p.q.data) +
                (counts[h] ? tile.offset(p.q, row_of(h), 0) : 0) + quad_lane * 8;
      unit[h] = 1;
      if constexpr (kSchedule.narrows_q()) {
        unit[h] = unit_of_row<kConfig.key_tiles()>(from[h], counts[h]);
        factor[h] = inverse_of_power(unit[h]);
      }
      log2s[h] = arguments.unit.log2s * unit[h];
    }
    const auto load = [&](i32 h, i32 vector) {
      const ptx::U32x4 x =
          counts[h] ? ptx::load_global_x4(from[h] + vector * 8) : ptx::U32x4{{0, 0, 0, 0}};
      if constexpr (!kSchedule.narrows_q()) return x;
      return vector < 8 * Config::kTiles ? scaled<kNinthDType, kDType>(x, factor[h])
                                         : scaled<kNinthDType, kNinthDType>(x, factor[h]);
    };
#pragma unroll
    for (i32 n = 0; n < kConfig.register_tiles(); ++n) {
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          const ptx::U32x4 x = load(h, 8 * n + 4 * i);
#pragma unroll
          for (i32 w = 0; w < 4; ++w) Q[n][8 * i + 2 * w + h] = x.word[w];
        }
      }
    }
#pragma unroll
    for (i32 n = kConfig.register_tiles(); n < kConfig.key_tiles(); ++n) {
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          ptx::store_shared_x4(
              shared.q(n).unit(static_cast<u32>(row_of(h)), quad_lane + 4 * static_cast<u32>(i)),
              load(h, 8 * n + 4 * i));
        }
      }
    }
    ptx::fence_proxy_async();
#pragma unroll
    for (i32 n = 0; n < kConfig.register_tiles(); ++n) {
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) transpose_words(Q[n] + 8 * i + h);
      }
    }
    sync();
  }

  void attend(const MlaTask& task, u32 count) {
    const i32 end = task.first_key + task.num_blocks * kConfig.keys();
#pragma unroll 1
    for (i32 first = task.first_key; first < end; first += kConfig.keys()) {
      step(first, count, first > task.first_key);
    }
    announce();
  }

  // The block of keys from `first` on.
  void step(i32 first, u32 count, bool has_last) {
    Scores S;
    const bool delays = has_last && is_there();
    if (has_last && !delays) announce();
    multiply<0, kEarlyTiles>(S);
    multiply<kEarlyTiles, kConfig.key_tiles()>(S);
    ptx::wgmma_wait<1>();
    if (delays) announce();
    ptx::wgmma_wait<0>();
    if (first < full.begin || full.end < first + kConfig.keys()) {
      const Keys seen = shared.seen(count);
      clear_unseen(first, seen);
      hide(S, first, seen);
    }
    if constexpr (kConfig.gathers) hide_missing(S);
    refer(S);
#pragma unroll
    for (i32 k = 0; k < kConfig.keys() / 16; ++k) store_weights(S, k);
    ptx::fence_proxy_async();
    ptx::warp_sync();  // lanes -> the one that announces
    of_p.advance();
    weighed.advance();
  }

  // Whether the block of keys has landed; in one lane.
  bool is_there() const {
    if (lane_index() != 0) return true;
    bool is_there = true;
#pragma unroll
    for (i32 piece = 0; piece < Config::kPieces; piece += kConfig.pieces_together()) {
      is_there &= ptx::mbarrier_test(shared.full(keys.index, piece), keys.phase);
    }
    return is_there;
  }

  // The P that was stored last.
  void announce() const {
    if (lane_index() == 0)
      ptx::mbarrier_arrive(shared.p_full((of_p.index + 1) % Config::kPBuffers));
  }

  // S (+)= Q K^T of the next block, some tiles as they land.
  template <i32 kBegin, i32 kEnd>
  void multiply(Scores& S) {
    ptx::wgmma_fence();
#pragma unroll
    for (i32 n = kBegin; n < kEnd; ++n) {
      if (n < Config::kTiles && n % (kConfig.pieces_together() * Config::kPieceTiles) == 0) {
        ptx::mbarrier_wait(shared.full(keys.index, n / Config::kPieceTiles), keys.phase);
        // Whoever writes keys has copies on their way, which a fence would wait for.
        if constexpr (kConfig.gathers) ptx::fence_proxy_async();
        ptx::wgmma_fence();
      }
      const MlaTile K = shared.keys(keys.index, n);
#pragma unroll
      for (i32 k = 0; k < Config::kColumns / 16; ++k) {
        if (n < kConfig.register_tiles()) {
          const u32* const a = Q[n] + 4 * k;
          ptx::wgmma_rs<kDType, false>(S, a[0], a[1], a[2], a[3], K.rows(k), n > 0 || k > 0);
        } else if (n < Config::kTiles) {
          ptx::wgmma_ss<kDType, false>(S, shared.q(n).rows(k), K.rows(k), true);
        } else {
          ptx::wgmma_ss<kNinthDType, false>(S, shared.q(n).rows(k), K.rows(k), true);
        }
      }
    }
    ptx::wgmma_commit();
    if constexpr (kEnd == kConfig.key_tiles()) keys.advance();
  }

  // Keys that no row of the tile sees become 0 as values: a probability of 0 times whatever lies
  // there could be NaN.
  void clear_unseen(i32 first, const Keys& seen) const {
    if (seen.begin <= first && first + kConfig.keys() <= seen.end) return;
    sync();  // all warps have read K
#pragma unroll 1
    for (u32 at = thread; at < kConfig.keys() * 8; at += 128) {
      if (seen.contains(first + static_cast<i32>(at / 8))) continue;
#pragma unroll 1
      for (i32 tile = 0; tile < Config::kTiles; ++tile) {
        ptx::store_shared_x4(shared.keys(weighed.index, tile).unit(at / 8, at % 8), {{0, 0, 0, 0}});
      }
    }
    ptx::fence_proxy_async();
  }

  // Maxima follow the scores; what they grew by is told to the warpgroups of values.
  void refer(const Scores& S) {
    float top[2];
    float grown = -kInfinity<float>;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      top[h] = S[2 * h];
#pragma unroll
      for (i32 f = 2 * h; f < kConfig.keys() / 2; f += 4) {
        top[h] = ptx::max(top[h], ptx::max(S[f], S[f + 1]));
      }
      grown = ptx::max(grown, (top[h] - maximum[h]) * log2s[h]);
    }
    const bool grew = ptx::any(grown > 8);
    ptx::mbarrier_wait(shared.p_empty(of_p.index), of_p.phase ^ 1);
    if (grew) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        top[h] = ptx::max(top[h], ptx::shuffle_xor(top[h], 1));
        top[h] = ptx::max(top[h], ptx::shuffle_xor(top[h], 2));
        const float now = ptx::max(maximum[h], top[h]);
        const float factor = factor_of(maximum[h], now, log2s[h]);
        sum[h] *= factor;
        maximum[h] = now;
        if (thread % 4 == 0) {
          ptx::store_shared(shared.factor(of_p.index, row_of(h)), __builtin_bit_cast(u32, factor));
        }
      }
    }
    if (lane_index() == 0) {
      ptx::store_shared(shared.grew(of_p.index, static_cast<i32>(thread / 32)), grew);
    }
  }

  // P = exp(S - maximum) times 2^weight_log2, of the k-th 16 keys.
  void store_weights(const Scores& S, i32 k) {
    constexpr float kWeight = kSchedule.weight_log2();
    u32 P[4];
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float shift = maximum[h] == -kInfinity<float> ? 0.f : maximum[h];
#pragma unroll
      for (i32 i = h; i < 4; i += 2) {
        const float* const s = S + 8 * k + 2 * i;
        const float x = ptx::exp2((s[0] - shift) * log2s[h] + kWeight);
        const float y = ptx::exp2((s[1] - shift) * log2s[h] + kWeight);
        sum[h] += x + y;
        P[i] = ptx::pack<kDType>(x, y);
      }
    }
    const u32 row = thread / 32 * 16 + thread % 16;
    ptx::stmatrix_x4(shared.p(of_p.index).unit(row, static_cast<u32>(2 * k) + thread % 32 / 16),
                     {{P[0], P[1], P[2], P[3]}});
  }

  void hide(Scores& S, i32 first, const Keys& seen) const {
    Keys visible[2];
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      visible[h] = seen;
      if constexpr (kMasked) {
        const ptx::U32x2 x = ptx::load_shared_x2(shared.visible(row_of(h)));
        visible[h] = {static_cast<i32>(x.word[0]), static_cast<i32>(x.word[1])};
      }
    }
#pragma unroll
    for (i32 f = 0; f < kConfig.keys() / 2; ++f) {
      const i32 column = first + f / 4 * 8 + 2 * static_cast<i32>(thread % 4) + f % 2;
      if (!visible[f / 2 % 2].contains(column)) S[f] = -kInfinity<float>;
    }
  }

  // Keys that are not there.
  void hide_missing(Scores& S) {
    const u32 word = ptx::load_shared(shared.missing(weighed.index, static_cast<i32>(thread % 4)));
    if (word == 0) return;
    misses |= word >> 31 != 0;
#pragma unroll
    for (i32 f = 0; f < kConfig.keys() / 2; ++f) {
      if ((word >> (f / 4 * 2 + f % 2) & 1) != 0) S[f] = -kInfinity<float>;
    }
  }

  static float factor_of(float before, float now, float log2s) {
    if (before == now) return 1;
    return before == -kInfinity<float> ? 0.f : ptx::exp2((before - now) * log2s);
  }

  // Whether some key of the task has no page, or none that products can tell.
  bool has_bad(u32 count) const {
    if constexpr (kConfig.gathers) return ptx::any(misses);  // warps see the same keys
    return ptx::load_shared(shared.bad(count)) != 0;
  }

  // What becomes of the rows: of a whole row tile the factors of its sums, for whoever stores them,
  // and statistics; of another its part's maxima and sums.
  void finish(const Tile& tile, const MlaTask& task, u32 count) {
    const bool is_bad = has_bad(count);
    if (task.is_whole) ptx::mbarrier_wait(shared.ends_empty(), ends_phase ^ 1);
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      sum[h] += ptx::shuffle_xor(sum[h], 1);
      sum[h] += ptx::shuffle_xor(sum[h], 2);
    }
    if (thread % 4 < 2) {  // a lane a row
      const i32 h = static_cast<i32>(thread % 2);
      const MlaRow found{h != 0 ? maximum[1] * unit[1] : maximum[0] * unit[0],
                         is_bad ? -1.f : (h != 0 ? sum[1] : sum[0])};
      if (task.is_whole) {
        const MlaRowEnd end = end_row<kConfig>(tile, row_of(h), found, true);
        ptx::store_shared_x2(shared.end(row_of(h)), {{__builtin_bit_cast(u32, end.factor),
                                                      __builtin_bit_cast(u32, end.sum)}});
      } else {
        float* const state =
            MlaParts<kConfig>{arguments, row_tile}.part(worker, task.is_first != 0) +
            MlaParts<kConfig>::state(row_of(h));
        state[0] = found.maximum;
        state[1] = found.sum;
      }
    }
    if (!task.is_whole) return;
    ends_phase ^= 1;
    ptx::warp_sync();  // lanes -> the one that announces
    if (lane_index() == 0) ptx::mbarrier_arrive(shared.ends_full());
  }
};

}  // namespace fulmen
