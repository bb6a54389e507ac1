// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producer of forward_sm90 over pools of pages: a warp whose lanes look up entries of the page
// table and hand the boxes of a block of keys to the copy engine, one box a page or several.
#pragma once

#include "kernels/forward_sm90/producer.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// The boxes of a block of keys that a lane has: every 32nd. Those past the last key are of the page
// behind the last, where the copy engine finds zeros, and so are those whose entry names no page.
template <ForwardSm90Config kConfig>
struct PageBoxes {
  static constexpr i32 kMost = ceil_div(kConfig.kv_rows, 32);

  i32 page[kMost];
  i32 row[kMost];       // of the page
  bool is_bad = false;  // an entry names no page

  PageBoxes(const AttentionParams& p, const QueryBlock& q, const SeqlenInfo& seqlen, i32 block,
            i32 box_rows) {
    const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);
    const i64 first_entry = p.page_table.offset(q.batch, 0, 0, seqlen.kv_batch);
#pragma unroll
    for (i32 i = 0; i < kMost; ++i) {
      const i32 tile_row = first_row(i, box_rows);
      const i32 key = block * kConfig.kv_rows + tile_row;
      const u32 in_cache = static_cast<u32>(seqlen.kv_begin + key);
      const u32 entry = in_cache / page_rows;
      row[i] = static_cast<i32>(in_cache - entry * page_rows);
      page[i] = static_cast<i32>(p.num_pages);
      if (tile_row >= kConfig.kv_rows || key >= seqlen.shape.kv_len) continue;
      const i64 id =
          load_aligned_index(p.page_table, first_entry + i64{entry} * p.page_table.strides[3]);
      if (is_bad_page(id, p.num_pages)) {
        is_bad = true;
      } else {
        page[i] = static_cast<i32>(id);
      }
    }
  }

  // In the tile.
  static i32 first_row(i32 i, i32 box_rows) {
    return (static_cast<i32>(ptx::thread_index() % 32) + 32 * i) * box_rows;
  }
};

// All lanes of a warp; lane 0 speaks to the other warps.
template <ForwardSm90Config kConfig>
struct PagedProducer {
  using Boxes = PageBoxes<kConfig>;

  ForwardProducer<kConfig> producer;
  const AttentionParams& p = producer.params.attention;
  i32 box_rows = key_box_rows(p, kConfig.kv_rows);

  static bool leads() { return ptx::thread_index() % 32 == 0; }

  // After the barrier was told how many bytes come.
  void load(const TensorMap& map, u32 tile, u32 barrier, i32 dims, const Boxes& boxes,
            i32 head) const {
    ptx::warp_sync();
#pragma unroll
    for (i32 i = 0; i < Boxes::kMost; ++i) {
      const i32 row = Boxes::first_row(i, box_rows);
      if (row >= kConfig.kv_rows) continue;
      producer.load(map, tile + row * 128, barrier, dims, kConfig.kv_rows, boxes.row[i], head,
                    boxes.page[i], ptx::kEvictLast);
    }
  }

  void load_k(const Boxes& boxes, i32 head) {
    const auto ring = producer.shared.k();
    if (leads()) ring.producer_acquire(producer.k_at);
    load(producer.maps.k, ring.address(producer.k_at), ring.full(producer.k_at), kConfig.d_qk,
         boxes, head);
    producer.k_at.advance();
  }

  void load_v(const Boxes& boxes, i32 head, bool ends_inside) {
    const auto ring = producer.shared.v();
    const u32 barrier =
        ends_inside ? producer.shared.landed(producer.v_at) : ring.full(producer.v_at);
    if (leads()) ring.producer_acquire(producer.v_at, barrier);
    load(producer.maps.v, ring.address(producer.v_at), barrier, kConfig.d_v, boxes, head);
    producer.v_at.advance();
  }

  // The boxes of block j of work tile number `count`, whose rows see nothing if one is bad.
  Boxes find_boxes(const QueryBlock& block, const SeqlenInfo& seqlen, i32 j, u32 count) const {
    const Boxes boxes(p, block, seqlen, j, box_rows);
    if (ptx::any(boxes.is_bad) && leads()) {
      ptx::store_shared(producer.shared.bad_page(count), 1);
      if (p.faults != nullptr) ptx::set_bits(p.faults, kFaultPages);
    }
    return boxes;
  }

  // In the order of ForwardProducer.
  void load_block(const QueryBlock& block, const SeqlenInfo& seqlen, i32 first, i32 last,
                  u32 count) {
    const i32 head = producer.kv_head(block);
    const auto ends_inside = [&](i32 j) {
      return rows_inside<kConfig>(seqlen, j) < kConfig.kv_rows;
    };
    Boxes above = find_boxes(block, seqlen, last, count);
    if (leads() && last <= first + 1) ptx::mbarrier_arrive(producer.shared.nearly_loaded());
    load_k(above, head);
    if (leads()) producer.load_q(block, seqlen);
#pragma unroll 1
    for (i32 j = last - 1; j >= first; --j) {
      const Boxes boxes = find_boxes(block, seqlen, j, count);
      if (leads() && j == first + 1) ptx::mbarrier_arrive(producer.shared.nearly_loaded());
      load_k(boxes, head);
      load_v(above, head, ends_inside(j + 1));
      above = boxes;
    }
    load_v(above, head, ends_inside(first));
  }

  void run() {
    const auto& shared = producer.shared;
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.published(count), shared.parity(count));
      const QueryBlock block = read_work_tile(shared, count).block;
      if (block.q_block < 0) return;
      const KeyBlocks blocks = read_key_blocks(shared, count, 0);
      load_block(block, read_seqlen_info(shared, producer.params, block, count), blocks.all_begin,
                 blocks.all_end - 1, count);
    }
  }
};

}  // namespace fulmen
