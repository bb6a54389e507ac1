// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// S = Q K^T and O += P V of a split, by each of its warps or by warpgroups: operands and sums of
// both lie in registers in the same way.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/decode_sm80/operands.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Of a warp by itself: 16 rows by keys and values that ldmatrix reads, with Q in registers; or,
// transposed, 8 rows, which are their columns.
template <DecodeSm80Config kConfig>
struct WarpProducts {
  using Layout = DecodeLayout<kConfig>;
  using Producer = DecodeProducerSm80<kConfig>;
  static constexpr bool kTransposed = Layout::kTransposed;
  static constexpr i32 kHeads = kConfig.heads_of_warp();
  static constexpr i32 kFloats = Layout::kFloats, kOFloats = Layout::kOFloats;
  static constexpr DType kProducts = Layout::kProducts;

  float O[kOFloats];
  DecodeQueries<kConfig> Q;
  i32 head[2];  // of k and v, in the row tile, of this lane's two rows
  u32 lost;     // NaN of e4m3, under kLostBits

  void start(const RowTile<kConfig>& tile) {
    // By index: with iterators over more than 64 floats NVRTC 13.0 keeps O in memory.
#pragma unroll
    for (i32 f = 0; f < kOFloats; ++f) O[f] = 0;
    lost = 0;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if constexpr (kHeads > 1) head[h] = tile.kv_head_of(Layout::row_of(h));
    }
    Q.load(tile);
  }

  // Of dot products of this lane's row of half h.
  float unit(i32 h) const { return Q.unit[h]; }
  bool has_lost() const { return ptx::any((lost & kLostBits) != 0); }

  // S = Q K^T
  void multiply_q_k(float (&S)[kFloats], const typename Producer::KTile& k) {
#pragma unroll
    for (float& s : S) s = 0;
    if constexpr (kConfig.is_quantised()) return multiply_bytes(S, right_rows(k));
    const auto keys = Layout::rows_of_keys(k);
    if constexpr (kHeads > 1) return multiply_heads(S, keys);
    const i32 first = Layout::own_pair(kConfig.d_qk);
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 16; ++step) {
#pragma unroll
      for (i32 n = 0; n < kConfig.kv_rows / 16; ++n) {
        const ptx::U32x4 b = ptx::ldmatrix_x4(keys.at(first + step, 16 * n));
        if constexpr (kTransposed) {
          ptx::mma_m16n8k16<kProducts>(&S[4 * n], b.word, Q.fragment[step].word[0],
                                       Q.fragment[step].word[2]);
        } else {
          ptx::mma_m16n8k16<kProducts>(&S[8 * n], Q.fragment[step].word, b.word[0], b.word[1]);
          ptx::mma_m16n8k16<kProducts>(&S[8 * n + 4], Q.fragment[step].word, b.word[2], b.word[3]);
        }
      }
    }
  }

  // O += P V, P in S
  void multiply_p_v(const float (&S)[kFloats], const typename Producer::VTile& v) {
    const auto values = Layout::columns_of_values(v);
    const i32 first = Layout::own_pair(kConfig.d_v);
#pragma unroll
    for (i32 k = 0; k < kConfig.kv_rows / 16; ++k) {
      const ptx::U32x4 P = Layout::weights(&S[k * kFloats * 16 / kConfig.kv_rows]);
#pragma unroll
      for (i32 n = 0; n < kHeads * kConfig.d_v * kConfig.kv_bytes() / 32; ++n) {
        const ptx::U32x4 b = ptx::ldmatrix_x4_trans(values.at(first + n, 16 * k));
        if constexpr (kConfig.is_quantised()) {
          multiply_bytes(&O[n * kOFloats * 32 / kConfig.d_v], P, b);
        } else if constexpr (kTransposed) {
          ptx::mma_m16n8k16<kProducts>(&O[4 * n], b.word, P.word[0], P.word[1]);
        } else {
          ptx::mma_m16n8k16<kProducts>(&O[8 * n], P.word, b.word[0], b.word[1]);
          ptx::mma_m16n8k16<kProducts>(&O[8 * n + 4], P.word, b.word[2], b.word[3]);
        }
      }
    }
  }

  // Float f of O of the row of half h: of the dims of its own head.
  float own_O(i32 f, i32 h) const {
    float own = O[f];
#pragma unroll
    for (i32 of = 1; of < kHeads; ++of)
      own = chosen(head[h] == of, O[f + of * kOFloats / kHeads], own);
    return own;
  }

 private:
  // By value: where an address is chosen NVRTC 13.0 keeps all in memory.
  static float chosen(bool is_first, float x, float y) { return is_first ? x : y; }
  // S = Q K^T of each head of k and v, of which a column keeps that of its row's head.
  template <class Rows>
  void multiply_heads(float (&S)[kFloats], const Rows& keys) {
    float S_of[kHeads][kFloats]{};
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 16; ++step) {
#pragma unroll
      for (i32 of = 0; of < kHeads; ++of) {
#pragma unroll
        for (i32 n = 0; n < kConfig.kv_rows / 16; ++n) {
          const ptx::U32x4 b = ptx::ldmatrix_x4(keys.at(of * kConfig.d_qk / 16 + step, 16 * n));
          ptx::mma_m16n8k16<kProducts>(&S_of[of][4 * n], b.word, Q.fragment[step].word[0],
                                       Q.fragment[step].word[2]);
        }
      }
    }
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) {
      float own = S_of[0][f];
#pragma unroll
      for (i32 of = 1; of < kHeads; ++of)
        own = chosen(head[Layout::half_of(f)] == of, S_of[of][f], own);
      S[f] = own;
    }
  }
  template <BytePairs kPairs>
  WidenedPairs widened(u32 bytes) {
    if constexpr (kConfig.loses_nan()) lost |= lost_e4m3(bytes);
    return widen_bytes<kConfig.kv_dtype(), kPairs, kConfig.converts>(bytes);
  }

  // S = Q K^T of bytes. A matrix of ldmatrix has 8 keys and 16 dims, of which a lane gets four
  // neighbours: two pairs are what it has in a fragment, see DecodeQueries.
  template <class Rows>
  void multiply_bytes(float (&S)[kFloats], const Rows& keys) {
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 32; ++step) {
#pragma unroll
      for (i32 n = 0; n < kConfig.kv_rows / 16; ++n) {
        const ptx::U32x4 b = ptx::ldmatrix_x4(keys.at(step, 16 * n));
        if constexpr (kTransposed) {
#pragma unroll
          for (i32 i = 0; i < 2; ++i) {
            const WidenedPairs upper = widened<BytePairs::kNeighbours>(b.word[i]);
            const WidenedPairs lower = widened<BytePairs::kNeighbours>(b.word[i + 2]);
            const u32 k[] = {upper.first, lower.first, upper.second, lower.second};
            const ptx::U32x4& q = Q.fragment[2 * step + i];
            ptx::mma_m16n8k16<kProducts>(&S[4 * n], k, q.word[0], q.word[2]);
          }
          continue;
        }
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
          const WidenedPairs k = widened<BytePairs::kNeighbours>(b.word[i]);
          ptx::mma_m16n8k16<kProducts>(&S[8 * n + i / 2 * 4], Q.fragment[2 * step + i % 2].word,
                                       k.first, k.second);
        }
      }
    }
  }

  // O += P V over 16 keys and 32 dims of bytes. Transposed as if neighbouring dims were one number,
  // the even dims and the odd dims of 16 are the columns of two fragments.
  void multiply_bytes(float* sums, const ptx::U32x4& P, const ptx::U32x4& b) {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const WidenedPairs upper = widened<BytePairs::kAlternate>(b.word[2 * half]);
      const WidenedPairs lower = widened<BytePairs::kAlternate>(b.word[2 * half + 1]);
      if constexpr (kTransposed) {
        const u32 v[] = {upper.first, upper.second, lower.first, lower.second};
        ptx::mma_m16n8k16<kProducts>(sums + 4 * half, v, P.word[0], P.word[1]);
      } else {
        ptx::mma_m16n8k16<kProducts>(sums + 8 * half, P.word, upper.first, lower.first);
        ptx::mma_m16n8k16<kProducts>(sums + 8 * half + 4, P.word, upper.second, lower.second);
      }
    }
  }
};

// Of warpgroups (Hopper): 64 rows by all keys of a step, which tensor cores read in shared memory
// once, where warps by themselves would each load all of them. Q lies where O of the split does at
// the end of a row tile.
template <DecodeSm80Config kConfig>
struct WarpgroupProducts {
  using Layout = DecodeLayout<kConfig>;
  using Producer = DecodeProducerSm80<kConfig>;
  static constexpr i32 kRows = 64;  // of a warpgroup
  using QTile = OperandTile<kRows, true>;

  float O[Layout::kOFloats];

  // All warps of the split.
  void start(const RowTile<kConfig>& tile) {
#pragma unroll
    for (i32 f = 0; f < Layout::kOFloats; ++f) O[f] = 0;
    DecodeQueries<kConfig> Q;
    Q.load(tile);
    share(Q);
  }

  static float unit(i32) { return 1; }
  static bool has_lost() { return false; }
  float own_O(i32 f, i32) const { return O[f]; }

  // S = Q K^T
  void multiply_q_k(float (&S)[Layout::kFloats], const typename Producer::KTile& k) {
    using KTile = typename Producer::KTile;
    const u32 q_at = queries().descriptor(), k_at = k.descriptor();
    ptx::wgmma_fence();
#pragma unroll
    for (i32 d = 0; d < kConfig.d_qk; d += 16) {
      ptx::wgmma_ss<Layout::kProducts, false>(S, q_at + QTile::columns_from(d),
                                              k_at + KTile::columns_from(d), d > 0);
    }
    finish(S);
  }

  // O += P V, P in S
  void multiply_p_v(const float (&S)[Layout::kFloats], const typename Producer::VTile& v) {
    using VTile = typename Producer::VTile;
    constexpr i32 kSteps = kConfig.kv_rows / 16;
    ptx::U32x4 P[kSteps];
#pragma unroll
    for (i32 k = 0; k < kSteps; ++k) P[k] = Layout::weights(&S[8 * k]);
    const u32 v_at = v.descriptor_transposed();
    ptx::wgmma_fence();
#pragma unroll
    for (i32 k = 0; k < kSteps; ++k) {
      const u32(&p)[4] = P[k].word;
      ptx::wgmma_rs<Layout::kProducts, true>(O, p[0], p[1], p[2], p[3],
                                             v_at + VTile::rows_from(16 * k), true);
    }
    finish(O);
  }

 private:
  // Of this warp's warpgroup.
  static QTile queries() {
    return {ptx::dynamic_shared() + kConfig.exchange_at() +
            Split<kConfig>::number() * kConfig.exchange_bytes() +
            Split<kConfig>::row_warp() / 4 * kRows * 2 * kConfig.d_qk};
  }

  static void share(const DecodeQueries<kConfig>& Q) {
#pragma unroll
    for (i32 k = 0; k < kConfig.d_qk / 16; ++k) {
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const u32 row = static_cast<u32>(Layout::row_of_q(i % 2)) % kRows;
        const u32 vector = static_cast<u32>(2 * k + i / 2);
        ptx::store_shared(queries().unit(row, vector) + lane_index() % 4 * 4,
                          Q.fragment[k].word[i]);
      }
    }
    ptx::fence_proxy_async();
    Split<kConfig>::sync();  // warps -> their rows
  }

  template <i32 kFloats>
  static void finish(float (&sums)[kFloats]) {
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(sums);
  }
};

template <DecodeSm80Config kConfig, bool kOfWarpgroup = kConfig.in_warpgroups()>
struct DecodeProductsKind {
  using Type = WarpProducts<kConfig>;
};
template <DecodeSm80Config kConfig>
struct DecodeProductsKind<kConfig, true> {
  using Type = WarpgroupProducts<kConfig>;
};

}  // namespace fulmen
