// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The way of tiles into the shared memory of backward_sm80: K and V of its block once, and for
// every tile of queries a stage with Q, dO and what backward_preprocess_sm80 keeps of the rows.
#pragma once

#include "kernels/backward_sm80/storage.cuh"
#include "kernels/common/documents_sm80.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/pair_tiles_sm80.cuh"
#include "kernels/common/tile_copy_sm80.cuh"

namespace fulmen {

template <BackwardSm80Config kConfig>
struct BackwardProducerSm80 {
  template <i32 kRows, i32 kDims>
  using Copy = TileCopy<kConfig.aligned, kRows, kConfig.threads(), kConfig.words(kDims),
                        kConfig.swizzle, kConfig.element_bytes()>;

  const AttentionParams& p;
  i32 index;  // of the sequence
  KeyBlockSm80 keys;
  BackwardStorageSm80<kConfig> storage;

  void fetch_keys() const {
    const i64 rows = keys.sequence.shape.kv_len;
    const i32 first = keys.first_key;
    const auto offset = [&](const ArrayView& array) {
      return array.offset(keys.sequence.batch, keys.kv_head, keys.sequence.kv_begin, 0);
    };
    Copy<kConfig.kv_rows, kConfig.d_qk>(p.k, offset(p.k), rows, p.dim_qk)
        .start(storage.k_tile(), first);
    Copy<kConfig.kv_rows, kConfig.d_v>(p.v, offset(p.v), rows, p.dim_v)
        .start(storage.v_tile(), first);
    ptx::cp_async_commit();
  }

  // Numbers of the keys' documents, where there are any.
  void fetch_ids(const BackwardHeadOf<kConfig>& head) const {
    if constexpr (kConfig.score.documents) {
#pragma unroll 1
      for (i32 at = static_cast<i32>(ptx::thread_index()); at < kConfig.kv_rows;
           at += kConfig.threads()) {
        const i64 key = keys.first_key + at;
        const bool counts = key < keys.sequence.shape.kv_len;
        store_id(storage.key_ids() + at * 8,
                 counts ? load_index(p.kv_ids, document_offset(head, key)) : 0);
      }
    }
  }

  // The way to the tiles of queries of one head.
  struct Queries {
    i32 head;
    Copy<kConfig.q_rows, kConfig.d_qk> q;
    Copy<kConfig.q_rows, kConfig.d_v> dout;
  };
  Queries queries_of(i32 head) const {
    const auto offset = [&](const ArrayView& array) {
      return array.offset(keys.sequence.batch, head, keys.sequence.q_begin, 0);
    };
    const i64 rows = keys.sequence.shape.q_len;
    return {head, {p.q, offset(p.q), rows, p.dim_qk}, {p.dout, offset(p.dout), rows, p.dim_v}};
  }

  // Q and dO from row `first` on, their statistics, and mask and bias of their pairs.
  void fetch(const Queries& queries, i32 first, const u8* stats, i32 stage) const {
    queries.q.start(storage.q_tile(stage), first);
    queries.dout.start(storage.dout_tile(stage), first);
#pragma unroll
    for (i32 at = 0; at < kConfig.row_bytes(); at += 16 * kConfig.threads()) {
      const i32 byte = at + 16 * static_cast<i32>(ptx::thread_index());
      if (byte < kConfig.row_bytes()) {
        ptx::cp_async_16(storage.rows_at(stage) + byte, stats + byte, true);
      }
    }
    PairTiles<kConfig.pairs()>(p, keys.sequence.shape, index, queries.head, first)
        .start(storage.pairs_at(stage), keys.first_key);
    ptx::cp_async_commit();
  }
};

}  // namespace fulmen
