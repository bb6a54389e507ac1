// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Numbers of documents where arrays and shared memory hold them, and which keys a block of queries
// must look at: from the first to the last whose number could be one of its queries'. Called by
// forward_sm80, backward_sm80 and backward_preprocess_sm80.
#pragma once

#include "kernels/common/fragments.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

template <class HeadType>
inline i64 document_offset(const HeadType& head, i64 key) {
  return head.p.kv_ids.offset(head.kv_batch(), 0, 0, head.sequence.kv_begin + key);
}
template <class HeadType>
inline i64 document_of_row(const HeadType& head, i64 row) {
  const ArrayView& ids = head.p.q_ids;
  return load_index(ids, ids.offset(head.sequence.batch, 0, 0, head.sequence.q_begin + row));
}
inline bool is_id_aligned(const u8* from, i64 size) {
  return reinterpret_cast<u64>(from) % static_cast<u64>(size) == 0;
}

inline void store_id(u32 to, i64 id) {
  ptx::store_shared(to, static_cast<u32>(id));
  ptx::store_shared(to + 4, static_cast<u32>(id >> 32));
}
inline i64 load_id(u32 from) {
  return static_cast<i64>(u64{ptx::load_shared(from + 4)} << 32 | ptx::load_shared(from));
}

// Scores of pairs of two documents become -inf. own: numbers of the thread's rows, two of every 16;
// key_id(f): that of the column of float f of a row.
template <i32 kTiles, i32 kFloats, class KeyId>
inline void hide_other_documents(float (&S)[kTiles][kFloats], const i64 (&own)[kTiles][2],
                                 const KeyId& key_id) {
#pragma unroll
  for (i32 f = 0; f < kFloats; f += 4) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      const i64 id = key_id(f + e);
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        hide_in_column(S[t], f + e, [&](i32 h) { return id != own[t][h]; });
      }
    }
  }
}

// The first begin and the last end of a warp's lanes.
inline void join_lanes(i32& begin, i32& end) {
#pragma unroll 1
  for (u32 distance = 1; distance < 32; distance *= 2) {
    begin = min(begin, static_cast<i32>(ptx::shuffle_xor(static_cast<u32>(begin), distance)));
    end = max(end, static_cast<i32>(ptx::shuffle_xor(static_cast<u32>(end), distance)));
  }
}

// All threads of a block of kThreads together.
template <class HeadType, i32 kThreads>
struct DocumentBoundsSm80 {
  const HeadType& head;
  i32 first_row, num_rows;  // of the block
  u32 shared;               // 8 bytes for each warp

  // The part of `keys` outside of which nothing is visible to the rows.
  Interval find(Interval keys) const {
    const ArrayView& ids = head.p.kv_ids;
    const u8* const from = ids.data + document_offset(head, 0) * size_bytes(ids.dtype);
    if (!is_id_aligned(from, size_bytes(ids.dtype))) return keys;
    i64 low = 0, high = 0;
    find_range(low, high);
    i32 begin = static_cast<i32>(keys.end), end = static_cast<i32>(keys.begin);
    if (ids.dtype == DType::kInt64) {
      scan(reinterpret_cast<const i64*>(from), keys, low, high, begin, end);
    } else {
      scan(reinterpret_cast<const i32*>(from), keys, low, high, begin, end);
    }
    share(begin, end);
    return {begin, max(begin, end)};
  }

 private:
  // Smallest and largest number of the rows, found by every warp.
  void find_range(i64& low, i64& high) const {
    low = high =
        document_of_row(head, first_row + min(static_cast<i32>(lane_index()), num_rows - 1));
#pragma unroll 1
    for (i32 row = 32 + static_cast<i32>(lane_index()); row < num_rows; row += 32) {
      const i64 id = document_of_row(head, first_row + row);
      low = min(low, id);
      high = max(high, id);
    }
#pragma unroll 1
    for (u32 distance = 1; distance < 32; distance *= 2) {
      low = min(low, from_lane_across(low, distance));
      high = max(high, from_lane_across(high, distance));
    }
  }
  static i64 from_lane_across(i64 x, u32 distance) {
    const u32 low = ptx::shuffle_xor(static_cast<u32>(x), distance);
    return static_cast<i64>(u64{ptx::shuffle_xor(static_cast<u32>(x >> 32), distance)} << 32 | low);
  }

  // This thread's share of the keys.
  template <class T>
  void scan(const T* ids, Interval keys, i64 low, i64 high, i32& begin, i32& end) const {
    const i64 stride = head.p.kv_ids.strides[3];
    const i32 last = static_cast<i32>(keys.end);
#pragma unroll 8
    for (i32 key = static_cast<i32>(keys.begin) + static_cast<i32>(ptx::thread_index()); key < last;
         key += kThreads) {
      const i64 id = ids[key * stride];
      if (id < low || id > high) continue;
      begin = min(begin, key);
      end = max(end, key + 1);
    }
  }

  // The first begin and the last end of all threads of the block.
  void share(i32& begin, i32& end) const {
    join_lanes(begin, end);
    if (lane_index() == 0) {
      ptx::store_shared(shared + warp_index() * 8, static_cast<u32>(begin));
      ptx::store_shared(shared + warp_index() * 8 + 4, static_cast<u32>(end));
    }
    ptx::block_sync();  // all warps -> begin and end
#pragma unroll 1
    for (u32 warp = 0; warp < kThreads / 32; ++warp) {
      begin = min(begin, static_cast<i32>(ptx::load_shared(shared + warp * 8)));
      end = max(end, static_cast<i32>(ptx::load_shared(shared + warp * 8 + 4)));
    }
    ptx::block_sync();  // all warps have read them
  }
};

}  // namespace fulmen
