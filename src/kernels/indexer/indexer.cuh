// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The indexer of sparse latent attention (DeepSeek-V3.2, 2025, section 2.1): of the keys that a
// query row sees, the topk of the highest
//
//   score(i, j) = sum over h of weights(i, h) max(0, dot(q(i, h), k(j)))
//
// A block has a row. It meets the keys tile by tile: a thread has a key of the tile and a group of
// heads, in float32, and what it finds is kept in shared memory while there is room, and then the
// best topk of it: memory does not grow with the number of keys. A row that sees no more than topk
// keys needs no score.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/indexer/config.h"
#include "kernels/indexer/params.h"
#include "kernels/indexer/tensor_scores.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Where a key lies. page < 0: nowhere, which the host is told.
struct IndexedKey {
  i64 page;
  i64 page_row;
};

inline IndexedKey find_key(const IndexerParams& p, i64 batch, i64 key) {
  if (!p.page_table.present()) return {batch, key};
  const i64 column = key / p.extents.page_size;
  const i64 page = load_index(p.page_table, p.page_table.offset(batch, 0, 0, column));
  const bool is_there = page >= 0 && page < p.extents.pages;
  if (!is_there) report(p.faults, kFaultPages);
  return {is_there ? page : -1, key - column * p.extents.page_size};
}

// Keys of a request; an entry that is out of range counts as 0, and the host is told.
inline i64 load_keys(const IndexerParams& p, i64 batch) {
  if (!p.kv_lengths.present()) return p.extents.keys;
  const i64 keys = load_index(p.kv_lengths, p.kv_lengths.offset(0, 0, 0, batch));
  if (keys >= 0 && keys <= p.extents.keys) return keys;
  report(p.faults, kFaultKvLengths);
  return 0;
}

// What a block keeps of the keys of a row.
template <i32 kCapacity, i32 kFresh, i32 kThreads>
struct RankedKeys {
  u64 kept[kCapacity];
  u64 fresh[kFresh];  // of the tile that came last; 0: none
  i32 count;
  u64 least;  // what comes is kept where it is larger
};

// Sorts so that the largest comes first (Batcher's bitonic network, 1968). By all threads of the
// block, before and after which they meet.
template <i32 kCount, i32 kThreads>
void sort_falling(u64* keys, i32 thread) {
#pragma unroll 1
  for (i32 size = 2; size <= kCount; size *= 2) {
#pragma unroll 1
    for (i32 distance = size / 2; distance > 0; distance /= 2) {
      for (i32 i = thread; i < kCount / 2; i += kThreads) {
        const i32 low = 2 * i - (i & (distance - 1));
        const u64 a = keys[low], b = keys[low + distance];
        const bool falls = (low & size) == 0;
        if ((a < b) == falls) {
          keys[low] = b;
          keys[low + distance] = a;
        }
      }
      ptx::block_sync();
    }
  }
}

// Leaves the best topk, in falling order.
template <i32 kCapacity, i32 kFresh, i32 kThreads>
void keep_best(RankedKeys<kCapacity, kFresh, kThreads>& keys, i32 topk, i32 thread) {
  const i32 count = keys.count;
  for (i32 i = count + thread; i < kCapacity; i += kThreads) keys.kept[i] = 0;
  ptx::block_sync();
  sort_falling<kCapacity, kThreads>(keys.kept, thread);
  if (thread == 0) {
    keys.count = min(count, topk);
    keys.least = count >= topk ? keys.kept[topk - 1] : 0;
  }
  ptx::block_sync();
}

// Adds what is fresh. By all threads; the first warp moves them.
template <i32 kCapacity, i32 kFresh, i32 kThreads>
void add_fresh(RankedKeys<kCapacity, kFresh, kThreads>& keys, i32 topk, i32 thread) {
  ptx::block_sync();
  if (thread < 32) {
    i32 count = keys.count;
    for (i32 begin = 0; begin < kFresh; begin += 32) {
      const u64 key = keys.fresh[begin + thread];
      const u32 are_there = ptx::ballot(key != 0);
      if (key != 0) keys.kept[count + ptx::count_ones(are_there & ((1u << thread) - 1))] = key;
      count += ptx::count_ones(are_there);
    }
    ptx::warp_sync();  // all have read the count
    if (thread == 0) keys.count = count;
  }
  ptx::block_sync();
  if (keys.count + kFresh > kCapacity) keep_best(keys, topk, thread);
}

// Tiles of q and k: on CUDA cores some dims in float32, on tensor cores all of them in 16 bits.
template <IndexerConfig kConfig, bool kOnTensorCores>
struct IndexerTiles {
  float q[kConfig.tile_heads()][IndexerConfig::kTileDims];
  float k[IndexerConfig::kTileKeys][IndexerConfig::kTileDims + 1];
};
template <IndexerConfig kConfig>
struct IndexerTiles<kConfig, true> {
  static constexpr i32 kColumns = kConfig.dim + IndexerConfig::kPadding;
  u16 q[kConfig.tile_heads()][kColumns];
  u16 k[IndexerConfig::kTileKeys][kColumns];
  float weights[kConfig.tile_heads()];
};

template <IndexerConfig kConfig>
struct IndexerShared {
  static constexpr i32 kKeys = IndexerConfig::kTileKeys;
  static constexpr i32 kDims = IndexerConfig::kTileDims;
  RankedKeys<kConfig.capacity, kKeys, kConfig.num_threads> ranked;
  IndexedKey place[kKeys];
  IndexerTiles<kConfig, (kConfig.dim > 0)> tiles;
  float score[kConfig.head_groups()][kKeys];
};

// One row of q, and its block.
template <IndexerConfig kConfig>
struct IndexerRow {
  using Shared = IndexerShared<kConfig>;
  using Q = typename ElementOf<kConfig.q>::Type;
  using K = typename ElementOf<kConfig.k>::Type;
  static constexpr i32 kKeys = Shared::kKeys;
  static constexpr i32 kDims = Shared::kDims;
  static constexpr i32 kHeads = IndexerConfig::kHeadsOfThread;
  static constexpr DType kProduct = kConfig.product();
  static constexpr i32 kRowBytes = 2 * (kConfig.dim + IndexerConfig::kPadding);

  const IndexerParams& p;
  Shared& shared;
  i32 thread;
  i64 batch;
  i64 row;

  // Of all heads of a group at once, and some dims.
  void load_tile(i64 head, i64 dim) const {
    ptx::block_sync();  // the tile before was read
    for (i32 i = thread; i < kConfig.tile_heads() * kDims; i += kConfig.num_threads) {
      const i64 h = head + i / kDims, d = dim + i % kDims;
      float x = 0;
      if (h < p.extents.heads && d < p.extents.dim) {
        x = widen(load_element<Q>(p.q.data + p.q.offset(batch, h, row, d) * i64{sizeof(Q)}));
      }
      shared.tiles.q[i / kDims][i % kDims] = x;
    }
    for (i32 i = thread; i < kKeys * kDims; i += kConfig.num_threads) {
      const IndexedKey place = shared.place[i / kDims];
      const i64 d = dim + i % kDims;
      float x = 0;
      if (place.page >= 0 && d < p.extents.dim) {
        const i64 element = p.k.offset(place.page, 0, place.page_row, d);
        x = widen(load_element<K>(p.k.data + element * i64{sizeof(K)}));
      }
      shared.tiles.k[i / kDims][i % kDims] = x;
    }
    ptx::block_sync();
  }

  // S[h] += q(head + h) . k(key of the thread), over the dims of a tile.
  void add_products(float (&S)[kHeads], i32 key, i32 first_head) const {
#pragma unroll 4
    for (i32 d = 0; d < kDims; ++d) {
      const float k = shared.tiles.k[key][d];
#pragma unroll
      for (i32 h = 0; h < kHeads; ++h) S[h] += shared.tiles.q[first_head + h][d] * k;
    }
  }

  float scale_of(const IndexedKey& place) const {
    if (!p.k_scale.present() || place.page < 0) return 1.0f;
    const i64 element = p.k_scale.offset(place.page, 0, place.page_row, 0);
    return load_element<float>(p.k_scale.data + element * i64{sizeof(float)});
  }

  // The part of the thread's heads in the score of its key.
  float score(i32 key, i32 first_head) const {
    const float scale = scale_of(shared.place[key]);
    float sum = 0;
#pragma unroll 1
    for (i64 head = 0; head < p.extents.heads; head += kConfig.tile_heads()) {
      float S[kHeads] = {};
#pragma unroll 1
      for (i64 dim = 0; dim < p.extents.dim; dim += kDims) {
        load_tile(head, dim);
        add_products(S, key, first_head);
      }
      for (i32 h = 0; h < kHeads && head + first_head + h < p.extents.heads; ++h) {
        const i64 weight = p.weights.offset(batch, head + first_head + h, row, 0);
        sum += load_real_called<float>(p.weights, weight) * rectified(S[h] * scale);
      }
    }
    return sum;
  }

  static u32 address_of(const void* part) {
    const u8* const begin = ptx::shared_bytes();
    return ptx::dynamic_shared() + static_cast<u32>(static_cast<const u8*>(part) - begin);
  }

  // The same on tensor cores: q and weights of some heads, zeros behind the last.
  void load_heads(i64 head) const {
    constexpr i32 kRuns = kConfig.dim / 8;
    const u32 tile = address_of(shared.tiles.q);
    for (i32 i = thread; i < kConfig.tile_heads() * kRuns; i += kConfig.num_threads) {
      const i64 h = head + i / kRuns, d = 8 * (i % kRuns);
      const u32 to = tile + static_cast<u32>(i / kRuns * kRowBytes + i % kRuns * 16);
      if (h < p.extents.heads && d < p.extents.dim) {
        put_eight<kConfig.q, kProduct>(p.q.data + p.q.offset(batch, h, row, d) * i64{sizeof(Q)},
                                       to);
      } else {
        ptx::store_shared_x4(to, {});
      }
    }
    for (i32 i = thread; i < kConfig.tile_heads(); i += kConfig.num_threads) {
      const bool is_there = head + i < p.extents.heads;
      const i64 weight = is_there ? p.weights.offset(batch, head + i, row, 0) : 0;
      shared.tiles.weights[i] = is_there ? load_real_called<float>(p.weights, weight) : 0;
    }
  }

  void load_keys() const {
    constexpr i32 kRuns = kConfig.dim / 8;
    const u32 tile = address_of(shared.tiles.k);
    for (i32 i = thread; i < kKeys * kRuns; i += kConfig.num_threads) {
      const IndexedKey place = shared.place[i / kRuns];
      const i64 d = 8 * (i % kRuns);
      const u32 to = tile + static_cast<u32>(i / kRuns * kRowBytes + i % kRuns * 16);
      if (place.page >= 0 && d < p.extents.dim) {
        const i64 element = p.k.offset(place.page, 0, place.page_row, d);
        put_eight<kConfig.k, kProduct>(p.k.data + element * i64{sizeof(K)}, to);
      } else {
        ptx::store_shared_x4(to, {});
      }
    }
  }

  // is_first: of the row's tiles; later ones find the heads where they are, if one tile has all.
  void score_on_tensor_cores(bool is_first) const {
    const i32 lane = thread % 32, first_key = thread / 32 * 16;
    TensorScores<kProduct, kConfig.dim> scores;
    float sums[2] = {};
    load_keys();
#pragma unroll 1
    for (i64 head = 0; head < p.extents.heads; head += kConfig.tile_heads()) {
      if (head > 0) ptx::block_sync();  // the heads before were read
      if (is_first || p.extents.heads > kConfig.tile_heads()) load_heads(head);
      ptx::block_sync();
      if (head == 0) {
        scores.load_keys(address_of(shared.tiles.k), first_key, lane);
      }
      const float scale[2] = {scale_of(shared.place[first_key + lane / 4]),
                              scale_of(shared.place[first_key + lane / 4 + 8])};
      const i32 heads = static_cast<i32>(min<i64>(p.extents.heads - head, kConfig.tile_heads()));
#pragma unroll 1
      for (i32 h = 0; h < heads; h += 8) {
        scores.add_heads(address_of(shared.tiles.q), h, heads, shared.tiles.weights, scale, sums,
                         lane);
      }
    }
    scores.add_threads(sums);
    if (lane % 4 == 0) {
      shared.score[0][first_key + lane / 4] = sums[0];
      shared.score[0][first_key + lane / 4 + 8] = sums[1];
    }
  }

  // The scores of a tile, for each group of heads.
  void score_tile(i32 key, i32 group, bool is_first) const {
    if constexpr (kConfig.dim > 0) {
      score_on_tensor_cores(is_first);
    } else {
      shared.score[group][key] = score(key, group * kHeads);
    }
  }

  // Ranks the keys of a tile.
  void rank_tile(i64 begin, i64 keys, bool needs_scores) const {
    ptx::block_sync();
    if (thread < kKeys) {
      const i64 key = begin + thread;
      const IndexedKey place = key < keys ? find_key(p, batch, key) : IndexedKey{-1, 0};
      shared.place[thread].page = place.page;
      shared.place[thread].page_row = place.page_row;
    }
    ptx::block_sync();
    const i32 key = thread % kKeys, group = thread / kKeys;
    if (needs_scores) score_tile(key, group, begin == 0);
    ptx::block_sync();
    if (group == 0) {
      float sum = 0;
      for (i32 g = 0; needs_scores && g < kConfig.head_groups(); ++g) sum += shared.score[g][key];
      const u64 found = shared.place[key].page < 0 ? 0 : ranked(sum, begin + key);
      shared.ranked.fresh[key] = found > shared.ranked.least ? found : 0;
    }
    add_fresh(shared.ranked, static_cast<i32>(p.extents.topk), thread);
  }

  // By rising number, then -1.
  void store_chosen() const {
    auto& ranked = shared.ranked;
    const i32 topk = static_cast<i32>(p.extents.topk);
    keep_best(ranked, topk, thread);
    const i32 count = ranked.count;
    for (i32 i = thread; i < kConfig.capacity; i += kConfig.num_threads) {
      ranked.kept[i] = i < count ? ~static_cast<u64>(number_of(ranked.kept[i])) : 0;
    }
    ptx::block_sync();
    sort_falling<kConfig.capacity, kConfig.num_threads>(ranked.kept, thread);
    for (i32 i = thread; i < topk; i += kConfig.num_threads) {
      i64 slot = -1;
      if (i < count) {
        const IndexedKey place = find_key(p, batch, static_cast<i64>(~ranked.kept[i]));
        slot = place.page * p.extents.page_size + place.page_row;
      }
      const i64 element = p.indices.offset(batch, 0, row, i);
      if (p.indices.dtype == DType::kInt64) {
        store_element(p.indices.data + element * 8, slot);
      } else {
        store_element(p.indices.data + element * 4, static_cast<i32>(slot));
      }
    }
  }
};

template <IndexerConfig kConfig>
void mla_indexer(const IndexerParams& p) {
  static_assert(sizeof(IndexerShared<kConfig>) == kConfig.shared_bytes());
  auto& shared = *reinterpret_cast<IndexerShared<kConfig>*>(ptx::shared_bytes());
  const i32 thread = static_cast<i32>(ptx::thread_index());
  const i64 number = ptx::block_index();
  const i64 batch = number / p.extents.rows;
  const IndexerRow<kConfig> row{p, shared, thread, batch, number - batch * p.extents.rows};
  const i64 keys = keys_of_row(load_keys(p, batch), p.extents.rows, row.row, p.extents.causal);
  if (thread == 0) {
    shared.ranked.count = 0;
    shared.ranked.least = 0;
  }
#pragma unroll 1
  for (i64 begin = 0; begin < keys; begin += IndexerConfig::kTileKeys) {
    row.rank_tile(begin, keys, keys > p.extents.topk);
  }
  ptx::block_sync();
  row.store_chosen();
}

}  // namespace fulmen
