// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The fallback of forward_sm90 for a work tile whose first result left the range of float32 or met
// an infinity or NaN: one block of keys after the other, the true maximum of each, no overlap. A
// matrix product multiplies every value by every probability, and 0 times NaN is NaN, so infinities
// and NaN in V are added to the rows that see them one by one, and set to 0 before the product. All
// warpgroups of the thread block run over the same blocks of keys here.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/forward_sm90/consumer.cuh"
#include "kernels/forward_sm90/epilogue.cuh"
#include "kernels/forward_sm90/output.cuh"
#include "kernels/forward_sm90/softmax.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/forward_sm90/values.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Whether one of the two 16-bit numbers of a word, or of its four of e4m3, is an infinity or NaN.
template <DType kDType>
constexpr bool is_nonfinite(u32 word) {
  if constexpr (kDType == DType::kFloat8E4M3) {
    return (((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0;
  }
  constexpr u32 kExponent = kDType == DType::kBFloat16 ? 0x7f80u : 0x7c00u;
  return (word & kExponent) == kExponent || (word >> 16 & kExponent) == kExponent;
}

// The number as float if it is an infinity or NaN, else 0.
template <DType kDType>
constexpr float nonfinite_part(u32 bits) {
  if (!is_nonfinite<kDType>(bits & 0xffffu)) return 0;
  const u16 x = static_cast<u16>(bits);
  return kDType == DType::kBFloat16 ? to_float(bf16{x}) : to_float(f16{x});
}

// The word with infinities and NaN set to 0.
template <DType kDType>
constexpr u32 finite_word(u32 word) {
  if constexpr (kDType == DType::kFloat8E4M3) {
    const u32 nan = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return word & ~((nan >> 7) * 0xffu);
  }
  const u32 low = is_nonfinite<kDType>(word & 0xffffu) ? 0 : word & 0xffffu;
  const u32 high = is_nonfinite<kDType>(word >> 16) ? 0 : word & 0xffff0000u;
  return low | high;
}

template <ForwardSm90Config kConfig>
struct ValueTile {
  static constexpr i32 kBytes = kConfig.v_bytes();
  using Tile = OperandTile<kConfig.kv_rows, kConfig.swizzle>;

  u32 tile;       // in shared memory
  i32 first_dim;  // of the columns that add_nonfinite adds

  // Every warp reads the whole tile, so that all come to the same answer.
  bool has_nonfinite() const {
    bool found = false;
#pragma unroll 1
    for (i32 at = ptx::thread_index() % 32 * 16; at < kBytes; at += 512) {
      const ptx::U32x4 x = ptx::load_shared_x4(tile + at);
      for (i32 w = 0; w < 4; ++w) found = found || is_nonfinite<kConfig.dtype>(x.word[w]);
    }
    return ptx::any(found);
  }

  // Adds the infinities and NaN of a key to this thread's two rows of O that see it, as a product
  // with any probability would; `kept` is 0 where dropout drops the pair, else 1.
  void add_nonfinite(float (&O)[kConfig.o_dims() / 2], i32 key, const bool (&sees)[2],
                     const float (&kept)[2]) const {
    if constexpr (kConfig.has_8_bits()) return add_nan(O, key, sees);
    const Tile part{tile + first_dim * kConfig.kv_rows * 2};
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 8; ++i) {
      const u32 word = ptx::load_shared(part.unit(key, i) + ptx::thread_index() % 4 * 4);
      const float low = nonfinite_part<kConfig.dtype>(word);
      const float high = nonfinite_part<kConfig.dtype>(word >> 16);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        O[4 * i + 2 * r] += sees[r] ? low * kept[r] : 0;
        O[4 * i + 2 * r + 1] += sees[r] ? high * kept[r] : 0;
      }
    }
  }

  // The same of e4m3, which has NaN alone.
  void add_nan(float (&O)[kConfig.o_dims() / 2], i32 key, const bool (&sees)[2]) const {
    const OperandTile<kConfig.d_v, true> transposed{tile};
    const u32 column = u32(value_column(key));
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 8; ++i) {
#pragma unroll
      for (u32 c = 0; c < 2; ++c) {
        const u32 row = u32(8 * i) + ptx::thread_index() % 4 * 2 + c;
        const u32 address = transposed.unit(row, column / 16) + column % 16;
        const u32 word = ptx::load_shared(address & ~3u);
        const float x = to_float(e4m3{static_cast<u8>(word >> address % 4 * 8)});
        if (x == x) continue;
#pragma unroll
        for (i32 r = 0; r < 2; ++r) O[4 * i + 2 * r + c] += sees[r] ? x : 0;
      }
    }
  }

  // By all consumers, a part each; the product may read the tile after a barrier.
  void zero_nonfinite() const {
#pragma unroll 1
    for (i32 at = ptx::thread_index() * 16; at < kBytes; at += 2048 * kConfig.warpgroups) {
      ptx::U32x4 x = ptx::load_shared_x4(tile + at);
      for (i32 w = 0; w < 4; ++w) x.word[w] = finite_word<kConfig.dtype>(x.word[w]);
      ptx::store_shared_x4(tile + at, x);
    }
    ptx::fence_proxy_async();
  }
};

// Which keys of a block have a certain value in a fragment, for the thread's two rows.
template <ForwardSm90Config kConfig>
struct MarkedKeys {
  u64 bits[2] = {};  // of the thread's own columns: bit 2 (key / 8) + key % 2

  MarkedKeys() = default;
  MarkedKeys(const float (&S)[kConfig.score_floats()], float mark) {
    const u32 sought = __builtin_bit_cast(u32, mark);
#pragma unroll
    for (i32 i = 0; i < kConfig.score_floats(); ++i) {
      const u64 found = __builtin_bit_cast(u32, S[i]) == sought ? 1 : 0;
      bits[i / 2 % 2] |= found << (i / 4 * 2 + i % 2);
    }
    ptx::compute_here(bits[0]);
    ptx::compute_here(bits[1]);
  }

  // By all lanes together, since the lane of the quad that has the key answers.
  bool has(i32 row, i32 key) const {
    const i32 own = i32(bits[row] >> (key / 8 * 2 + key % 2) & 1);
    return ptx::shuffle(own, (ptx::thread_index() % 32 & ~3u) + u32(key % 8 / 2)) != 0;
  }
};

// Adds infinities and NaN of a tile of V to the rows that see them, and sets them to 0 in the tile.
// hidden and dropped: the keys that options hide or drop.
template <ForwardSm90Config kConfig>
inline void add_nonfinite_values(const ForwardWarpgroup<kConfig>& wg,
                                 float (&O)[kConfig.o_dims() / 2], const Interval (&visible)[2],
                                 i32 j, const MarkedKeys<kConfig>& hidden,
                                 const MarkedKeys<kConfig>& dropped) {
  const ValueTile<kConfig> V{wg.shared.v().address(wg.v_at), wg.first_tile_dim()};
  if (!V.has_nonfinite()) return;
#pragma unroll 1
  for (i32 key = 0; key < kConfig.kv_rows; ++key) {
    const i64 column = i64{j} * kConfig.kv_rows + key;
    bool sees[2];
    float kept[2] = {1, 1};
    for (i32 r = 0; r < 2; ++r) {
      sees[r] = visible[r].contains(column);
      if constexpr (kConfig.score.has_pair_terms()) sees[r] = !hidden.has(r, key);
      if constexpr (kConfig.score.dropout) kept[r] = dropped.has(r, key) ? 0.f : 1.f;
    }
    V.add_nonfinite(O, key, sees, kept);
  }
  wg.sync_consumers();  // all warps have read V
  V.zero_nonfinite();
  wg.sync_consumers();  // all are 0
}

// O += P V of a block of keys, to the end.
template <ForwardSm90Config kConfig>
inline void multiply_block(Output<kConfig>& O, const u32 (&P)[kConfig.weight_words()], u32 v) {
  BlockOutput<kConfig> block;
  issue_block<kConfig>(O, block, P, v, true);
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(O);
  if constexpr (kAddsBlocks<kConfig>) ptx::wgmma_fence_operand(block);
  add_block<kConfig>(O, block);
}

template <ForwardSm90Config kConfig>
inline void compute_fallback(ForwardWarpgroup<kConfig>& wg,
                             const typename ForwardWarpgroup<kConfig>::Work& work,
                             const KeyBlocks& blocks, u32 failed) {
  Output<kConfig> O = {};
  u32 P[kConfig.weight_words()];
  float S[kConfig.score_floats()];
  RowSoftmax<kConfig> softmax{wg.softmax_factor()};
  const float sign = wg.take_operand_scale(softmax, work);
  float rescale[2];
  Interval visible[2];
  wg.find_visible_keys(visible, work);
  const FragmentScores<kConfig> scores = wg.scores_of(work);
  wg.shared.q().consumer_wait(wg.q_at);
  const u32 sQ = wg.shared.q().address(wg.q_at);
  QRegisters<kConfig> rQ;
  load_q_registers<kConfig>(rQ, sQ);
  KeyStep step{};  // with lists of tiles
#pragma unroll 1
  for (i32 next = blocks.all_end - 1;
       kConfig.score.has_tile_lists() ? !step.is_last() : next >= blocks.all_begin; --next) {
    // S = Q K^T
    wg.produce();
    wg.shared.k().consumer_wait(wg.k_at);
    i32 j = next;
    if constexpr (kConfig.score.has_tile_lists()) {
      j = take_key_step<kConfig>(wg.shared, wg.k_at, wg.warpgroup, step);
    }
    issue_scores<kConfig>(S, rQ, sQ, wg.shared.k().address(wg.k_at));
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(S);
    wg.release_k();
    // m = max(m, row maximum of S), O *= exp2(m_old - m), P = exp2(c (S - m))
    scores.apply_exactly(S, j * kConfig.kv_rows, wg.pair_tiles.tile(wg.warpgroup));
    wg.pair_tiles.release();
    wg.sign_scores(S, sign);
    wg.template apply_mask<MaskKind::kRight>(S, visible, j);
    MarkedKeys<kConfig> hidden;
    if constexpr (kConfig.score.has_pair_terms()) hidden = {S, -kInfinity<float>};
    if (softmax.template max_exp_sum<true, true>(S, rescale, wg.partner.maximum())) {
      scale_rows(O, rescale);
    }
    scores.pairs.drop(S, j * kConfig.kv_rows);
    MarkedKeys<kConfig> dropped;
    if constexpr (kConfig.score.dropout) dropped = {S, PairTerms<kConfig>::kDropped};
    round_weights<kConfig>(P, S);
    wg.partner.send(P);
    wg.partner.receive(P);
    // O += P V
    wg.shared.v().consumer_wait(wg.v_at);
    add_nonfinite_values(wg, O, visible, j, hidden, dropped);
    multiply_block<kConfig>(O, P, wg.v_tile());
    wg.sync_warpgroup();  // all warps have read V
    wg.release_v();
  }
  wg.release_q();
  softmax.finish();
  wg.partner.add(softmax.sum);
  ForwardEpilogue<kConfig>{wg}.template finish<true>(O, softmax, work, failed);
}

}  // namespace fulmen
