// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Infinities and NaN in a tile of V. A product multiplies every value by every probability, and 0
// times NaN is NaN: a hidden value would be seen. So a tile that holds any is taken apart: rows
// that see the key get the value added, then it becomes 0 for the product. The second attempt of
// forward_sm90 comes here with every tile, and all its warpgroups with it; V rows beyond a
// sequence's end, which are nobody's, become 0 in any attempt.
#pragma once

#include "kernels/common/operand_tile.cuh"
#include "kernels/forward_sm90/shared.cuh"
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

  // Sets rows `first` and on to 0, by one warp.
  void clear_rows(i32 first) const {
#pragma unroll 1
    for (u32 at = first * 8 + ptx::thread_index() % 32; at < kConfig.kv_rows * 8; at += 32) {
#pragma unroll
      for (i32 unit = 0; unit < kConfig.chunked(kConfig.d_v) / 8; unit += 8) {
        ptx::store_shared_x4(Tile{tile}.unit(at / 8, unit + at % 8), {{0, 0, 0, 0}});
      }
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

// One warp that follows the loader: between a tile of V and its readers where the sequence ends
// inside it.
template <AttentionConfig kConfig>
struct ForwardSweeper {
  using Shared = ForwardShared<kConfig>;

  const ForwardParams& params;
  Shared shared;
  typename Shared::KvCursor v_at;
  u32 parities = 0;  // of the `landed` barriers, one bit each

  void sweep(i32 rows) {
    ptx::mbarrier_wait(shared.landed(v_at), parities >> v_at.buffer & 1);
    parities ^= 1u << v_at.buffer;
    ValueTile<kConfig>{shared.v().address(v_at)}.clear_rows(rows);
    ptx::warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(shared.v().full(v_at));
  }

  void run() {
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.assigned(count), Shared::parity(count));
      const Assignment assignment = read_assignment(shared, count);
      if (assignment.block.q_block < 0) return;
      const Place place = read_place(shared, params, assignment.block, count);
      const KeyBlocks blocks = read_key_blocks(shared, count, 0);
      ptx::warp_sync();
      if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(shared.done(count));
#pragma unroll 1
      for (i32 j = blocks.all_end - 1; j >= blocks.all_begin; --j) {
        const i32 rows = rows_inside<kConfig>(place, j);
        if (rows < kConfig.kv_rows) sweep(rows);
        v_at.advance();
      }
    }
  }
};

}  // namespace fulmen
