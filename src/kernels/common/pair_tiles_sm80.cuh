// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Boolean mask and bias of a block of queries and a block of keys: raw elements of the arrays, on
// their way through shared memory with K, so that they have arrived when scores are computed.
// Rows lie further apart than they are long, so that the eight rows that a warp reads together meet
// different banks. Called by forward_sm80 and backward_sm80.
#pragma once

#include "kernels/common/fragments.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace fulmen {

// One array over pairs, elements of kBytes.
template <PairConfig kConfig, i32 kBytes>
class PairArray {
 public:
  static constexpr i32 kRowBytes = kConfig.row_bytes(kBytes);

  // Rows of a head of sequence `index` from `first_row` on.
  PairArray(const ArrayView& array, const SequenceShape& shape, i64 index, i64 head, i32 first_row)
      : array_(array),
        data_(array.data + array.offset(index, head, first_row, 0) * kBytes),
        num_rows_(shape.q_len - first_row),
        num_keys_(shape.kv_len) {}

  // Keys from `first` on. What is not there becomes 0. Belongs to the caller's next group of copies
  // where the array is aligned.
  void start(u32 tile, i32 first) const {
    if constexpr (kConfig.aligned) {
      copy_vectors(tile, own_vector(first), num_rows_, num_keys_ - first);
    } else {
      copy_elements(tile, first);
    }
  }

  // Tile after tile towards key 0: that which begins at key `first`, then those before it, whose
  // keys are all there.
  void start_last(u32 tile, i32 first) {
    start(tile, first);
    next_ = first - kConfig.kv_rows;
    from_ = own_vector(next_);
  }
  void start_next(u32 tile) {
    if constexpr (!kConfig.aligned) {
      copy_elements(tile, next_);
    } else if (num_rows_ >= kConfig.q_rows) {
      copy_vectors(tile, from_, kConfig.q_rows, kConfig.kv_rows);
    } else {
      copy_vectors(tile, from_, num_rows_, kConfig.kv_rows);
    }
    next_ -= kConfig.kv_rows;
    from_ -= kConfig.kv_rows * kBytes;
  }

  // Where a thread finds the 4 bytes that hold its first column of 16 x 8 pairs from (row, column)
  // on, or its first two; interleaved, its eight of 16 x 32.
  static u32 at(u32 tile, i32 row, i32 column) {
    const u32 lane = lane_index();
    const u32 own = kConfig.interleaved ? lane % 4 * 8 * kBytes : lane % 4 * 2 * kBytes / 4 * 4;
    return tile + (row + lane / 4) * kRowBytes + column * kBytes + own;
  }

 private:
  static constexpr i32 kVectors = kConfig.kv_rows * kBytes / 16;  // of a row
  static constexpr i32 kRowsAtOnce = kConfig.threads / kVectors;

  static i32 row() { return static_cast<i32>(ptx::thread_index()) / kVectors; }
  static i32 vector() { return static_cast<i32>(ptx::thread_index()) % kVectors; }
  i64 row_bytes() const { return array_.strides[2] * kBytes; }

  // This thread's first vector of the tile that begins at key `first`.
  const u8* own_vector(i32 first) const {
    return data_ + i64{first} * kBytes + row() * row_bytes() + vector() * 16;
  }

  // From `from`, this thread's first vector; of the tile `num_rows` and `num_keys` are there.
  void copy_vectors(u32 tile, const u8* from, i32 num_rows, i32 num_keys) const {
    static_assert(kConfig.threads % kVectors == 0);
    const u32 to = tile + static_cast<u32>(row() * kRowBytes + vector() * 16);
#pragma unroll
    for (i32 r = 0; r < kConfig.q_rows; r += kRowsAtOnce) {
      if (r + kRowsAtOnce > kConfig.q_rows && row() >= kConfig.q_rows - r) break;
      ptx::cp_async_16(to + static_cast<u32>(r * kRowBytes), from,
                       r + row() < num_rows && vector() * 16 < num_keys * kBytes);
      from += kRowsAtOnce * row_bytes();
    }
  }

  void copy_elements(u32 tile, i32 first) const {
    constexpr i32 kWords = kConfig.kv_rows * kBytes / 4;
    constexpr i32 kElements = 4 / kBytes;
#pragma unroll 2
    for (i32 at = static_cast<i32>(ptx::thread_index()); at < kConfig.q_rows * kWords;
         at += kConfig.threads) {
      const i32 row = at / kWords, word = at % kWords;
      u32 bits = 0;
#pragma unroll
      for (i32 e = 0; e < kElements; ++e) {
        const i32 key = first + word * kElements + e;
        if (row >= num_rows_ || key >= num_keys_) continue;
        const u8* const from = data_ + (row * array_.strides[2] + key * array_.strides[3]) * kBytes;
#pragma unroll
        for (i32 b = 0; b < kBytes; ++b)
          bits |= static_cast<u32>(from[b]) << (8 * (e * kBytes + b));
      }
      ptx::store_shared(tile + row * kRowBytes + word * 4, bits);
    }
  }

  const ArrayView& array_;
  const u8* data_;  // of row 0 of the block, key 0
  i32 num_rows_;    // from that row on
  i32 num_keys_;
  i32 next_ = 0;              // key of the next tile
  const u8* from_ = nullptr;  // own_vector() of it
};

template <PairConfig kConfig>
class PairTiles {
 public:
  PairTiles(const AttentionParams& p, const SequenceShape& shape, i64 index, i64 head,
            i32 first_row)
      : mask_(p.mask, shape, index, head, first_row),
        bias_(p.bias, shape, index, head, first_row) {}

  // Keys from `first` on, to kConfig.bytes() at `tile`.
  void start(u32 tile, i32 first) const {
    if constexpr (kConfig.mask) mask_.start(tile, first);
    if constexpr (kConfig.bias != DType::kNone) bias_.start(tile + kConfig.mask_bytes(), first);
  }

  // As PairArray.
  void start_last(u32 tile, i32 first) {
    if constexpr (kConfig.mask) mask_.start_last(tile, first);
    if constexpr (kConfig.bias != DType::kNone)
      bias_.start_last(tile + kConfig.mask_bytes(), first);
  }
  void start_next(u32 tile) {
    if constexpr (kConfig.mask) mask_.start_next(tile);
    if constexpr (kConfig.bias != DType::kNone) bias_.start_next(tile + kConfig.mask_bytes());
  }

  // Adds the bias to a warp's scores from (row, column) of the tile on, hides pairs. kKeepsHidden:
  // a bias of -inf hides even a NaN.
  template <bool kKeepsHidden, i32 kTiles, i32 kFloats>
  static void apply(float (&S)[kTiles][kFloats], u32 tile, i32 row, i32 column) {
    if constexpr (kConfig.bias != DType::kNone) {
      add_bias<kKeepsHidden>(S, tile + kConfig.mask_bytes(), row, column);
    }
    if constexpr (kConfig.mask) hide_masked(S, tile, row, column);
  }

 private:
  static constexpr i32 kBiasBytes = max(1, static_cast<i32>(size_bytes(kConfig.bias)));
  using Mask = PairArray<kConfig, 1>;
  using Bias = PairArray<kConfig, kBiasBytes>;

  template <i32 kTiles, i32 kFloats>
  static void hide_masked(float (&S)[kTiles][kFloats], u32 tile, i32 row, i32 column) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        hide_masked_row(S[t], h, Mask::at(tile, row + 16 * t + 8 * h, column));
      }
    }
  }

  // Half h of a fragment's rows. Unless eight columns lie side by side, a word holds the bytes of
  // four, two of them this thread's.
  template <i32 kFloats>
  static void hide_masked_row(float (&S)[kFloats], i32 h, u32 from) {
    if constexpr (kConfig.interleaved) {
      ptx::U32x2 words{};  // of eight floats
      hide_in_row(S, h, [&](i32 f) {
        const i32 e = f % 16 / 4 * 2 + f % 2;
        if (e == 0) words = ptx::load_shared_x2(from + static_cast<u32>(f / 16) * 32);
        return (words.word[e / 4] & 0xffu << e % 4 * 8) == 0;
      });
    } else {
      const u32 first = lane_index() % 2 == 0 ? 0xffu : 0xff0000u;
      u32 word = 0;  // of two floats
      hide_in_row(S, h, [&](i32 f) {
        if (f % 2 == 0) word = ptx::load_shared(from + static_cast<u32>(f / 4) * 8);
        return (word & first << f % 2 * 8) == 0;
      });
    }
  }

  template <bool kKeepsHidden, i32 kTiles, i32 kFloats>
  static void add_bias(float (&S)[kTiles][kFloats], u32 tile, i32 row, i32 column) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        add_bias_row<kKeepsHidden>(S[t], h, Bias::at(tile, row + 16 * t + 8 * h, column));
      }
    }
  }

  template <bool kKeepsHidden, i32 kFloats>
  static void add_bias_row(float (&S)[kFloats], i32 h, u32 from) {
    constexpr i32 kPairs = kConfig.interleaved ? 4 : 1;  // side by side
#pragma unroll
    for (i32 f = 2 * h; f < kFloats; f += 4 * kPairs) {
      ptx::F32x2 bias[kPairs];
      load_pairs(bias, from + static_cast<u32>(f / 4 * 8 * kBiasBytes));
#pragma unroll
      for (i32 e = 0; e < kPairs; ++e) {
        float* const pair = &S[f + 4 * e];
        pair[0] = with_bias<kKeepsHidden>(pair[0], bias[e].word[0]);
        pair[1] = with_bias<kKeepsHidden>(pair[1], bias[e].word[1]);
      }
    }
  }

  static void load_pairs(ptx::F32x2 (&bias)[1], u32 from) {
    if constexpr (kConfig.bias == DType::kFloat32) {
      bias[0] = ptx::load_shared_f32x2(from);
    } else {
      bias[0] = ptx::unpack<kConfig.bias>(ptx::load_shared(from));
    }
  }
  static void load_pairs(ptx::F32x2 (&bias)[4], u32 from) {
    const ptx::U32x4 x = ptx::load_shared_x4(from);
    if constexpr (kConfig.bias == DType::kFloat32) {
      const ptx::U32x4 y = ptx::load_shared_x4(from + 16);
#pragma unroll
      for (i32 w = 0; w < 8; ++w) {
        bias[w / 2].word[w % 2] = __builtin_bit_cast(float, w < 4 ? x.word[w] : y.word[w - 4]);
      }
    } else {
#pragma unroll
      for (i32 w = 0; w < 4; ++w) bias[w] = ptx::unpack<kConfig.bias>(x.word[w]);
    }
  }

  template <bool kKeepsHidden>
  static float with_bias(float s, float bias) {
    if (kKeepsHidden && bias == -kInfinity<float>) return bias;
    return s + bias;
  }

  Mask mask_;
  Bias bias_;
};

}  // namespace fulmen
