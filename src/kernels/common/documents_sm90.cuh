// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Documents by blocks of rows: the least and the largest id of each block, the numbering of blocks
// over all sequences, and searches among blocks by a warp. The kernel document_ranges_sm90 finds
// the ranges of all blocks of keys, before forward_sm90 and backward_dq_sm90 and on their
// arguments; or of all blocks of queries, before backward_preprocess_sm90, on arguments in which
// queries stand in the place of keys. Ids may come in any order; where the rows of a document are
// neighbours, the ranges find every block that can be skipped.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

inline i64 load_id(const ArrayView& ids, i64 at) {
  return ids.dtype == DType::kInt64 ? reinterpret_cast<const i64*>(ids.data)[at]
                                    : reinterpret_cast<const i32*>(ids.data)[at];
}

// Blocks of rows are numbered through: those of a sequence from here on. Packed sequences begin
// anywhere, so each may leave a number unused. rows: of the axis.
constexpr i64 first_range(bool packed, i64 rows, i32 block_rows, i64 sequence, i64 begin) {
  return packed ? begin / block_rows + sequence : sequence * ceil_div(rows, block_rows);
}
constexpr i64 first_key_range(const AttentionParams& p, i32 block_rows, i64 sequence,
                              i64 kv_begin) {
  return first_range(p.packed.kv, p.kv_rows, block_rows, sequence, kv_begin);
}

// The sequence that has block number `range`, if any has.
inline i64 sequence_of_key_range(const AttentionParams& p, i32 block_rows, i64 range) {
  if (!p.packed.kv) return range / ceil_div(p.kv_rows, block_rows);
  i64 low = 0, high = p.num_sequences - 1;
#pragma unroll 1
  while (low < high) {  // the last one that begins at or before it
    const i64 middle = (low + high + 1) / 2;
    const i64 begin = load_index(p.cu_kv, middle * p.cu_kv.strides[3]);
    if (first_key_range(p, block_rows, middle, begin) <= range) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The union over the lanes of a warp.
inline IdRange united(IdRange range) {
#pragma unroll 1
  for (u32 distance = 16; distance >= 1; distance /= 2) {
    const auto other = [&](i64 id) {
      return __builtin_bit_cast(i64, ptx::shuffle_xor(__builtin_bit_cast(double, id), distance));
    };
    const i64 least = other(range.least), largest = other(range.largest);
    range = {min(range.least, least), max(range.largest, largest)};
  }
  return range;
}

// Ids of rows [begin, end) of an axis; all lanes of a warp.
inline IdRange ids_of_rows(const ArrayView& ids, i64 batch, i32 begin, i32 end, u32 lane) {
  IdRange range;
#pragma unroll 1
  for (i32 i = begin + i32(lane); i < end; i += 32) {
    range.add(load_id(ids, ids.offset(batch, 0, 0, i)));
  }
  return united(range);
}

// The first block of `blocks`, or with kLast the last, for which `holds`; where none: the end of
// `blocks`, or its begin less 1. All lanes of a warp, 32 blocks at once.
template <bool kLast, class Holds>
inline i32 find_block(Interval blocks, u32 lane, const Holds& holds) {
#pragma unroll 1
  for (i32 done = 0; done < i32(blocks.size()); done += 32) {
    const i32 offset = done + i32(lane);
    const i32 block = kLast ? i32(blocks.end) - 1 - offset : i32(blocks.begin) + offset;
    const u32 found = ptx::ballot(offset < i32(blocks.size()) && holds(block));
    if (found == 0) continue;
    const i32 at = done + ptx::count_ones((found & (0 - found)) - 1);  // the lowest bit
    return kLast ? i32(blocks.end) - 1 - at : i32(blocks.begin) + at;
  }
  return i32(kLast ? blocks.begin - 1 : blocks.end);
}

template <ForwardSm90Config kConfig>
inline void document_ranges_sm90(const ForwardArguments& arguments) {
  const ForwardParams& params = arguments.params;
  const AttentionParams& p = params.attention;
  const i64 number = i64{ptx::block_index()} * kKeyRangeThreads + ptx::thread_index();
  if (number >= num_key_ranges(p.kv_rows, p.num_sequences, p.packed.kv, kConfig.kv_rows)) return;
  const i64 sequence = sequence_of_key_range(p, kConfig.kv_rows, number);
  const SeqlenInfo seqlen = seqlen_info_of<kConfig>(params, {0, 0, i32(sequence)});
  const i64 block = number - first_key_range(p, kConfig.kv_rows, sequence, seqlen.kv_begin);
  const i32 begin = i32(block * kConfig.kv_rows);
  const i32 end = min(begin + kConfig.kv_rows, seqlen.shape.kv_len);
  if (block < 0 || begin >= end) return;
  IdRange range;
#pragma unroll 8
  for (i32 j = begin; j < end; ++j) {
    range.add(load_id(p.kv_ids, p.kv_ids.offset(seqlen.batch, 0, 0, seqlen.kv_begin + j)));
  }
  params.key_ranges[number] = range;
}

}  // namespace fulmen
