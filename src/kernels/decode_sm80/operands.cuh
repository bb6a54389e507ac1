// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The rows of a row tile, and how a warp holds them: Q, S, P and O as operands of products.
//
// Tensor cores multiply 16 rows by 8 columns. Where a row tile has 8 rows or fewer they are the
// columns, S^T = K Q^T and O^T += V^T P^T: half the products, and half the registers of O.
#pragma once

#include "kernels/attention/kv_scale.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/decode_sm80/producer.cuh"

namespace fulmen {

// The rows of a row tile: (query row, head of the group), heads next to each other.
template <DecodeSm80Config kConfig>
struct RowTile {
  // Of a sequence that has keys, with nothing that says otherwise.
  static constexpr bool kOneRow = kConfig.one_query && !kConfig.ragged;

  const AttentionParams& p;
  ScoreUnit unit;
  i32 group;
  i32 kv_head;
  i32 index;  // of the sequence
  i32 first;  // row
  DecodeSequence sequence;

  RowTile(const DecodeSm80Params& params, i32 row_tile, const KeyCursor<kConfig>& cursor)
      : RowTile(params, row_tile, cursor.kv_head, cursor.index, cursor.sequence) {}
  RowTile(const DecodeSm80Params& params, i32 row_tile, i32 kv_head_, i32 index_,
          const DecodeSequence& sequence_)
      : RowTile(params.attention, params.unit, params.group, row_tile * kConfig.rows(), kv_head_,
                index_, sequence_) {}
  RowTile(const AttentionParams& p_, const ScoreUnit& unit_, i32 group_, i32 first_row,
          i32 kv_head_, i32 index_, const DecodeSequence& sequence_)
      : p(p_),
        unit(unit_),
        group(group_),
        kv_head(kv_head_),
        index(index_),
        first(first_row),
        sequence(sequence_) {}

  i32 head_of(i32 row) const {
    return kv_head * group + (kConfig.one_query ? first + row : (first + row) % group);
  }
  // Of k and v, of those of the row tile.
  i32 kv_head_of(i32 row) const {
    return (head_of(row) - kv_head * group) / (group / kConfig.heads);
  }
  i32 query_of(i32 row) const { return kConfig.one_query ? 0 : (first + row) / group; }
  // Rows that the arrays have here, and those that count.
  i32 num_rows() const {
    if constexpr (kConfig.one_query) return min(kConfig.rows(), group);
    const i32 queries = p.packed.q ? sequence.shape.q_len : static_cast<i32>(p.q_rows);
    return max(0, min(kConfig.rows(), queries * group - first));
  }
  bool counts(i32 row) const {
    return row < num_rows() && (kOneRow || query_of(row) < sequence.shape.q_len);
  }
  i64 offset(const ArrayView& array, i32 row, i32 dim) const {
    return array.offset(sequence.batch, head_of(row), i64{sequence.q_begin} + query_of(row), dim);
  }
};

// A lane has two rows of S and O, and of each floats of some columns: keys, dims.
template <DecodeSm80Config kConfig>
struct DecodeLayout {
  static constexpr bool kTransposed = kConfig.transposed;
  static constexpr i32 kFloats = kConfig.kv_rows / (kTransposed ? 4 : 2);
  static constexpr i32 kOFloats = kConfig.heads_of_warp() * kConfig.d_v / (kTransposed ? 4 : 2);
  static constexpr DType kProducts = kConfig.product_dtype();

  // This lane's two rows of the row tile: of S and O, and the row of Q that it loads.
  static i32 row_of(i32 h) {
    return kTransposed ? first_row() + 2 * static_cast<i32>(lane_index() % 4) + h : row_of_q(h);
  }
  static i32 row_of_q(i32 h) { return first_row() + static_cast<i32>(lane_index()) / 4 + 8 * h; }
  // Which of the two float f of S or O belongs to.
  static constexpr i32 half_of(i32 f) { return kTransposed ? f % 2 : f / 2 % 2; }

  // One of the lanes that share a row.
  static bool is_first_of_row() { return lane_index() % kLanesEnd < kLanesBegin; }
  template <class Operation>
  static float over_row(float x, const Operation& operation) {
#pragma unroll
    for (i32 lanes = kLanesBegin; lanes < kLanesEnd; lanes *= 2) {
      x = operation(x, ptx::shuffle_xor(x, static_cast<u32>(lanes)));
    }
    return x;
  }
  static float largest(float x, float y) { return ptx::max(x, y); }

  // The key of float f of S, of those from `first` on.
  static i32 column(i32 first, i32 f) {
    const i32 lane = static_cast<i32>(lane_index());
    if constexpr (kTransposed) return first + f / 4 * 16 + f / 2 % 2 * 8 + lane / 4;
    return first + f / 4 * 8 + 2 * (lane % 4) + f % 2;
  }
  // Scales of keys, for every float of S.
  static void load_scales(float (&x)[kFloats], u32 from) {
#pragma unroll
    for (i32 f = 0; f < kFloats; f += kTransposed ? 2 : 4) {
      const u32 at = from + static_cast<u32>(column(0, f)) * 4;
      if constexpr (kTransposed) {
        x[f] = x[f + 1] = kv_scale(__builtin_bit_cast(float, ptx::load_shared(at)));
      } else {
        const ptx::F32x2 pair = ptx::load_shared_f32x2(at);
        x[f] = x[f + 2] = kv_scale(pair.word[0]);
        x[f + 1] = x[f + 3] = kv_scale(pair.word[1]);
      }
    }
  }

  // Operands of products: keys, values, and P of 16 keys.
  static auto rows_of_keys(const typename DecodeProducerSm80<kConfig>::KTile& k) {
    if constexpr (kTransposed) {
      return left_rows(k, 0);
    } else {
      return right_rows(k);
    }
  }
  static auto columns_of_values(const typename DecodeProducerSm80<kConfig>::VTile& v) {
    if constexpr (kTransposed && !kConfig.is_quantised()) {
      return left_columns(v);
    } else {
      return right_columns(v);
    }
  }
  // Of the pairs of vectors of a key or value, which row by row are those of all heads, the first
  // of this warp's head.
  static i32 own_pair(i32 dims) {
    return kConfig.heads > kConfig.heads_of_warp() ? Split<kConfig>::row_warp() * dims / 16 : 0;
  }
  static ptx::U32x4 weights(const float* S) {
    ptx::U32x4 P{};
#pragma unroll
    for (i32 i = 0; i < (kTransposed ? 2 : 4); ++i) {
      P.word[i] = ptx::pack<kProducts>(S[2 * i], S[2 * i + 1]);
      if constexpr (kTransposed) P.word[i] = ptx::transpose_matrix(P.word[i]);
    }
    return P;
  }

 private:
  static i32 first_row() { return kConfig.rows_of_warp() * Split<kConfig>::row_warp(); }

  static constexpr i32 kLanesBegin = kTransposed ? 4 : 1;
  static constexpr i32 kLanesEnd = kTransposed ? 32 : 4;
};

// Powers of two, from 2^-126 to 2^126, as bits of a float.
constexpr u32 kSmallestPower = 1u << 23, kLargestPower = 253u << 23;
inline float inverse_of_power(float x) {
  return __builtin_bit_cast(float, 0x7f000000 - __builtin_bit_cast(u32, x));
}

// Rows of Q as fragments; rows of bfloat16 that become float16 in units of their own, powers of
// two.
template <DecodeSm80Config kConfig>
struct DecodeQueries {
  using Layout = DecodeLayout<kConfig>;

  ptx::U32x4 fragment[kConfig.d_qk / 16]{};
  float unit[2];

  void load(const RowTile<kConfig>& tile) {
#pragma unroll
    for (i32 h = 0; h < (kConfig.transposed ? 1 : 2); ++h) load(tile, h);
  }

 private:
  void load(const RowTile<kConfig>& tile, i32 h) {
    const AttentionParams& p = tile.p;
    const i32 row = Layout::row_of_q(h);
    const bool counts = tile.counts(row);
    const u8* const q = p.q.data + (counts ? tile.offset(p.q, row, 0) * 2 : 0);
#pragma unroll
    for (i32 k = 0; k < kConfig.d_qk / 16; ++k) {
#pragma unroll
      for (i32 part = 0; part < 2; ++part) {
        fragment[k].word[h + 2 * part] = counts ? load_pair(q, p.dim_qk, 16 * k, part) : 0;
      }
    }
    if constexpr (kConfig.narrows_q()) narrow(h);
  }
  // Row h of Q from bfloat16 to float16, its largest number at 2^14 .. 2^15: exact but for numbers
  // 2^29 times smaller.
  void narrow(i32 h) {
    constexpr u32 kFourteen = 14u << 23, kLargest = 254u << 23;
    u32 top = kSmallestPower + kFourteen;  // bits of a float, whose order is that of numbers
#pragma unroll
    for (i32 i = 0; i < kConfig.d_qk / 8; ++i) {
      const u32 pair = fragment[i / 2].word[h + 2 * (i % 2)];
      top = max(top, max(pair << 16 & 0x7f800000, pair & 0x7f800000));
    }
#pragma unroll
    for (i32 lanes = 1; lanes < 4; lanes *= 2) {
      top = max(top,
                __builtin_bit_cast(u32, ptx::shuffle_xor(__builtin_bit_cast(float, top), lanes)));
    }
    const u32 power = min(top, kLargest) - kFourteen;
    const float factor = inverse_of_power(__builtin_bit_cast(float, power));
    if constexpr (kConfig.transposed) {
      for (i32 row = 0; row < 2; ++row) {
        const u32 lane = 8 * (lane_index() % 4) + 4 * static_cast<u32>(row);
        unit[row] = __builtin_bit_cast(float, ptx::shuffle(static_cast<i32>(power), lane));
      }
    } else {
      unit[h] = __builtin_bit_cast(float, power);
    }
#pragma unroll
    for (i32 i = 0; i < kConfig.d_qk / 8; ++i) {
      u32& pair = fragment[i / 2].word[h + 2 * (i % 2)];
      const ptx::F32x2 x = ptx::unpack<kConfig.dtype>(pair);
      pair = ptx::pack<Layout::kProducts>(x.word[0] * factor, x.word[1] * factor);
    }
  }
  // Two numbers from the 16 dims from `first` on: those that a fragment of K has.
  static u32 load_pair(const u8* q, i64 dim_qk, i32 first, i32 part) {
    const i32 lane = static_cast<i32>(lane_index() % 4);
    const i32 dim = first + (kConfig.is_quantised() ? 4 * lane + 2 * part : 8 * part + 2 * lane);
    const bool is_there = first + 16 <= kConfig.d_qk - kConfig.dim_unit() || dim < dim_qk;
    return is_there ? *reinterpret_cast<const u32*>(q + dim * 2) : 0;
  }
};

}  // namespace fulmen
