// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The second attempt of forward_sm90 at a block of queries: the textbook, one block of keys after
// the other, the maximum of each, nothing in between. Finds infinities and NaN among the values
// (unusual_values.cuh), so all warpgroups visit all blocks of keys that one of them visits.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/forward_sm90/consumer.cuh"
#include "kernels/forward_sm90/epilogue.cuh"
#include "kernels/forward_sm90/softmax.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Whether one of the two 16-bit numbers of a word is an infinity or NaN.
template <DType kDType>
constexpr bool holds_unusual(u32 word) {
  constexpr u32 kExponent = kDType == DType::kBFloat16 ? 0x7f80u : 0x7c00u;
  return (word & kExponent) == kExponent || (word >> 16 & kExponent) == kExponent;
}

// The number as float if it is an infinity or NaN, else 0.
template <DType kDType>
constexpr float unusual_part(u32 bits) {
  if (!holds_unusual<kDType>(bits & 0xffffu)) return 0;
  const u16 x = static_cast<u16>(bits);
  return kDType == DType::kBFloat16 ? to_float(bf16{x}) : to_float(f16{x});
}

// The word with infinities and NaN set to 0.
template <DType kDType>
constexpr u32 usual_word(u32 word) {
  const u32 low = holds_unusual<kDType>(word & 0xffffu) ? 0 : word & 0xffffu;
  const u32 high = holds_unusual<kDType>(word >> 16) ? 0 : word & 0xffff0000u;
  return low | high;
}

template <AttentionConfig kConfig>
struct ValueTile {
  static constexpr i32 kBytes = kConfig.v_bytes();
  using Tile = OperandTile<kConfig.kv_rows, kConfig.swizzle>;

  u32 tile;           // in shared memory
  i32 first_dim = 0;  // of those that add_unusual adds

  // Looked at by every warp, so that all come to the same answer.
  bool has_unusual() const {
    bool found = false;
#pragma unroll 1
    for (i32 at = ptx::thread_index() % 32 * 16; at < kBytes; at += 512) {
      const ptx::U32x4 x = ptx::load_shared_x4(tile + at);
      for (i32 w = 0; w < 4; ++w) found = found || holds_unusual<kConfig.dtype>(x.word[w]);
    }
    return ptx::any(found);
  }

  // Adds the infinities and NaN of a key to this thread's two rows of O that see it, as a product
  // with any probability would; `kept` is 0 where dropout took the pair, else 1.
  void add_unusual(float (&O)[kConfig.o_dims() / 2], i32 key, const bool (&sees)[2],
                   const float (&kept)[2]) const {
    const Tile part{tile + first_dim * kConfig.kv_rows * 2};
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 8; ++i) {
      const u32 word = ptx::load_shared(part.unit(key, i) + ptx::thread_index() % 4 * 4);
      const float low = unusual_part<kConfig.dtype>(word);
      const float high = unusual_part<kConfig.dtype>(word >> 16);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        O[4 * i + 2 * r] += sees[r] ? low * kept[r] : 0;
        O[4 * i + 2 * r + 1] += sees[r] ? high * kept[r] : 0;
      }
    }
  }

  // By all consumers, each its part; then the product may read it, once all have met.
  void clear_unusual() const {
#pragma unroll 1
    for (i32 at = ptx::thread_index() * 16; at < kBytes; at += 2048 * kConfig.warpgroups) {
      ptx::U32x4 x = ptx::load_shared_x4(tile + at);
      for (i32 w = 0; w < 4; ++w) x.word[w] = usual_word<kConfig.dtype>(x.word[w]);
      ptx::store_shared_x4(tile + at, x);
    }
    ptx::fence_proxy_async();
  }
};

// Which keys of a block have a certain mark in a fragment, for the thread's two rows.
template <AttentionConfig kConfig>
struct MarkedKeys {
  u64 bits[2] = {};  // of the thread's own columns: bit 2 (key / 8) + key % 2

  MarkedKeys() = default;
  MarkedKeys(const float (&S)[kConfig.kv_rows / 2], float mark) {
    const u32 sought = __builtin_bit_cast(u32, mark);
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
      const u64 found = __builtin_bit_cast(u32, S[i]) == sought ? 1 : 0;
      bits[i / 2 % 2] |= found << (i / 4 * 2 + i % 2);
    }
    ptx::compute_here(bits[0]);
    ptx::compute_here(bits[1]);
  }

  // By all lanes together: each asks the lane of its quad that has the key.
  bool has(i32 row, i32 key) const {
    const i32 own = i32(bits[row] >> (key / 8 * 2 + key % 2) & 1);
    return ptx::shuffle(own, (ptx::thread_index() % 32 & ~3u) + u32(key % 8 / 2)) != 0;
  }
};

// Adds infinities and NaN of a tile of V to the rows that see them, and clears them for the
// product. hidden and dropped are asked only where options can hide or drop single pairs.
template <AttentionConfig kConfig>
inline void set_unusual_apart(const ForwardWarpgroup<kConfig>& own,
                              float (&O)[kConfig.o_dims() / 2], const Interval (&visible)[2], i32 j,
                              const MarkedKeys<kConfig>& hidden,
                              const MarkedKeys<kConfig>& dropped) {
  const ValueTile<kConfig> V{own.shared.v().address(own.v_at), own.first_dim()};
  if (!V.has_unusual()) return;
#pragma unroll 1
  for (i32 key = 0; key < kConfig.kv_rows; ++key) {
    const i64 column = i64{j} * kConfig.kv_rows + key;
    bool sees[2];
    float kept[2] = {1, 1};
    for (i32 r = 0; r < 2; ++r) {
      sees[r] = visible[r].contains(column);
      if constexpr (kConfig.has_pair_terms()) sees[r] = !hidden.has(r, key);
      if constexpr (kConfig.dropout) kept[r] = dropped.has(r, key) ? 0.f : 1.f;
    }
    V.add_unusual(O, key, sees, kept);
  }
  ptx::bar_sync(own.kAllBarrier, 128 * kConfig.warpgroups);  // all have seen them
  V.clear_unusual();
  ptx::bar_sync(own.kAllBarrier, 128 * kConfig.warpgroups);  // all are gone
}

template <AttentionConfig kConfig>
inline void compute_carefully(ForwardWarpgroup<kConfig>& own,
                              const typename ForwardWarpgroup<kConfig>::Task& task,
                              const KeyBlocks& blocks) {
  float O[kConfig.o_dims() / 2] = {};
  u32 P[kConfig.kv_rows / 4];
  float S[kConfig.kv_rows / 2];
  RowSoftmax<kConfig> softmax{own.softmax_factor()};
  float rescale[2];
  Interval visible[2];
  own.see(visible, task);
  const FragmentScores<kConfig> scores = own.scores_of(task);
  own.shared.q().wait(own.q_at);
  const u32 sQ = own.shared.q().address(own.q_at);
  QRegisters<kConfig> rQ;
  load_q_registers<kConfig>(rQ, sQ);
#pragma unroll 1
  for (i32 j = blocks.all_end - 1; j >= blocks.all_begin; --j) {
    // S = Q K^T
    own.feed();
    own.shared.k().wait(own.k_at);
    issue_scores<kConfig>(S, rQ, sQ, own.shared.k().address(own.k_at));
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(S);
    own.release_k();
    // S = exp2(c S - m), O *= exp2(m_old - m), P = S
    scores.apply(S, j * kConfig.kv_rows);
    own.template hide<Sight::kEnds>(S, visible, j);
    MarkedKeys<kConfig> hidden;
    if constexpr (kConfig.has_pair_terms()) hidden = {S, kNegativeInfinity};
    if (softmax.template update<true, true>(S, rescale)) scale_rows(O, rescale);
    scores.pairs.drop(S, j * kConfig.kv_rows);
    MarkedKeys<kConfig> dropped;
    if constexpr (kConfig.dropout) dropped = {S, PairTerms<kConfig>::kDropped};
    round_probabilities<kConfig>(P, S);
    // O += P V
    own.shared.v().wait(own.v_at);
    set_unusual_apart(own, O, visible, j, hidden, dropped);
    issue_output<kConfig>(O, P, own.v_tile(), true);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(O);
    own.meet();  // all warps have looked at V
    own.release_v();
  }
  own.release_q();
  softmax.finish();
  ForwardOutput<kConfig>{own}.template write<true>(O, softmax, task);
}

}  // namespace fulmen
