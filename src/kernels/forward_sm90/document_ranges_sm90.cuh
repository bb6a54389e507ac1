// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Least and largest document of every block of keys, for forward_sm90 and backward_dq_sm90, which
// run after it on the same arguments; of every block of queries, for backward_prepare_sm90, on
// arguments in which queries are in the place of keys. A thread for each block; of kConfig it needs
// kv_rows and sequences. Runs on any GPU.
#pragma once

#include "kernels/common/document_ranges.cuh"

namespace fulmen {

template <AttentionConfig kConfig>
inline void document_ranges_sm90(const ForwardArguments& arguments) {
  const ForwardParams& params = arguments.params;
  const AttentionParams& p = params.attention;
  const i64 number = i64{ptx::block_index()} * kKeyRangeThreads + ptx::thread_index();
  if (number >= num_key_ranges(p.kv_rows, p.num_sequences, p.packed, kConfig.kv_rows)) return;
  const i64 sequence = sequence_of_key_range(p, kConfig.kv_rows, number);
  const Place place = place_of<kConfig>(params, {0, 0, i32(sequence)});
  const i64 block = number - first_key_range(p, kConfig.kv_rows, sequence, place.kv_begin);
  const i32 begin = i32(block * kConfig.kv_rows);
  const i32 end = min(begin + kConfig.kv_rows, place.shape.kv_len);
  if (block < 0 || begin >= end) return;
  IdRange range;
#pragma unroll 8
  for (i32 j = begin; j < end; ++j) {
    range.add(load_id(p.kv_ids, p.kv_ids.offset(place.batch, 0, 0, place.kv_begin + j)));
  }
  params.key_ranges[number] = range;
}

}  // namespace fulmen
