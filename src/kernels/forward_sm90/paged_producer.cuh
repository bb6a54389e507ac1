// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producers of forward_sm90 over pools of pages. A warp loads Q and K, another V, so that each
// has half of the instructions that a block of keys takes: the copy engine in boxes of some rows
// (PagedProducer); or, where a box would have few, row by row by themselves (RowProducer), from
// addresses that a third warp finds (RowFinder).
#pragma once

#include "kernels/common/faults.cuh"
#include "kernels/forward_sm90/producer.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// By all lanes of a warp, before the keys of work tile number `count` land: its rows see nothing
// where an entry names no page.
template <ForwardSm90Config kConfig>
void report_bad_page(const ForwardStorage<kConfig>& shared, const AttentionParams& p, u32 count,
                     bool is_bad) {
  if (!ptx::any(is_bad) || ptx::thread_index() % 32 != 0) return;
  ptx::store_shared(shared.bad_page(count), 1);
  report(p.faults, kFaultPages);
}

// The boxes of a group of blocks of keys, found by the lanes of a warp, one each, from the last
// block to the first. Boxes past the last key are of the page behind the last, where the copy
// engine finds zeros, and so are those whose entry names no page.
template <ForwardSm90Config kConfig>
struct PageBoxes {
  const AttentionParams& p;
  i32 rows = key_box_rows(p, kConfig.kv_rows);
  i32 boxes = kConfig.kv_rows / rows;                          // of a block: at most 32
  i32 blocks = 32 / boxes;                                     // of a group
  i32 own_block = i32(ptx::thread_index() % 32) / boxes;       // of the group, from its last
  i32 own_row = i32(ptx::thread_index() % 32) % boxes * rows;  // of the block
  i32 last = 0;                                                // block of the group
  i32 page = 0;
  i32 row = 0;  // of the page

  bool has(i32 j) const { return last - j < blocks; }
  bool is_own(i32 j) const { return last - j == own_block; }

  // Those of the group that ends with block j; whether an entry names no page.
  bool find(const QueryBlock& q, const SeqlenInfo& seqlen, i32 first, i32 j) {
    last = j;
    page = static_cast<i32>(p.num_pages);
    row = 0;
    const i32 block = j - own_block;
    const i32 key = block * kConfig.kv_rows + own_row;
    if (own_block >= blocks || block < first || key >= seqlen.shape.kv_len) return false;
    const PageRow found = page_of_key(p, q, seqlen, key);
    if (is_bad_page(found.id, p.num_pages)) return true;
    page = static_cast<i32>(found.id);
    row = found.row;
    return false;
  }
};

// A lane asks for the boxes that it has found. Lane 0 speaks to the other warps.
template <ForwardSm90Config kConfig, bool kOfV>
struct PagedProducer {
  ForwardProducer<kConfig> producer;
  const AttentionParams& p = producer.params.attention;
  PageBoxes<kConfig> found{p};

  // The boxes of block j, after the barrier was told how many bytes come.
  void load(const TensorMap& map, u32 tile, u32 barrier, i32 dims, i32 j, i32 head) const {
    ptx::warp_sync();
    if (!found.is_own(j)) return;
    producer.load(map, tile + found.own_row * 128, barrier, dims, kConfig.kv_rows, found.row, head,
                  found.page, ptx::kEvictLast);
  }

  void load_k(i32 j, i32 head) {
    const auto ring = producer.shared.k();
    if (ptx::thread_index() % 32 == 0) ring.producer_acquire(producer.k_at);
    load(producer.maps.k, ring.address(producer.k_at), ring.full(producer.k_at), kConfig.d_qk, j,
         head);
    producer.k_at.advance();
  }

  void load_v(i32 j, i32 head, bool ends_inside) {
    const auto ring = producer.shared.v();
    const u32 barrier =
        ends_inside ? producer.shared.landed(producer.v_at) : ring.full(producer.v_at);
    if (ptx::thread_index() % 32 == 0) ring.producer_acquire(producer.v_at, barrier);
    load(producer.maps.v, ring.address(producer.v_at), barrier, kConfig.d_v, j, head);
    producer.v_at.advance();
  }

  void load_blocks(const QueryBlock& block, const KeyBlocks& blocks, const SeqlenInfo& seqlen,
                   u32 count) {
    const i32 first = blocks.all_begin, last = blocks.all_end - 1;
    const i32 head = producer.kv_head(block);
    const bool leads = ptx::thread_index() % 32 == 0;
#pragma unroll 1
    for (i32 j = last; j >= first; --j) {
      if (j == last || !found.has(j)) {
        const bool is_bad = found.find(block, seqlen, first, j);
        if constexpr (!kOfV) report_bad_page(producer.shared, p, count, is_bad);
      }
      if constexpr (kOfV) {
        load_v(j, head, rows_inside<kConfig>(seqlen, j) < kConfig.kv_rows);
        continue;
      }
      if (leads && j == min(first + 1, last)) producer.tell_nearly_loaded();
      load_k(j, head);
      if (leads && j == last) producer.load_q(block, seqlen);
    }
  }

  void run() {
    each_work_tile(producer.shared, producer.params,
                   [&](const QueryBlock& block, const KeyBlocks& blocks, const SeqlenInfo& seqlen,
                       u32 count) { load_blocks(block, blocks, seqlen, count); });
  }
};

// Where boxes would have few rows: a warp finds the rows of K and V, a lane one or some, for those
// that copy them. An address of 0 stands for zeros: past the last key, or in no page. Entries of
// the page table are asked for a block ahead, so that none is waited for.
template <ForwardSm90Config kConfig>
struct RowFinder {
  static constexpr i32 kRows = kConfig.kv_rows;
  static constexpr i32 kOwn = ceil_div(kRows, 32);  // rows of a lane
  using Shared = ForwardStorage<kConfig>;

  const ForwardParams& params;
  Shared shared;
  const AttentionParams& p = params.attention;
  typename Shared::FoundState at;
  PageRow found_rows[kOwn];

  static i32 own_row(i32 i) { return i32(ptx::thread_index() % 32) + 32 * i; }
  // Rows that lie 4 apart side by side: a lane that copies wants them together.
  static constexpr u32 offset_of(i32 row) { return (row % 4 * (kRows / 4) + row / 4) * 8; }

  // Of block j; of the last key in place of those past it.
  void look_up(const QueryBlock& q, const SeqlenInfo& seqlen, i32 j) {
    if (seqlen.shape.kv_len == 0) return;
#pragma unroll
    for (i32 i = 0; i < kOwn; ++i) {
      const i32 key = min(max(j, 0) * kRows + own_row(i), seqlen.shape.kv_len - 1);
      found_rows[i] = page_of_key(p, q, seqlen, key);
    }
  }

  // Rows of block j that were looked up; whether an entry names no page.
  bool store_rows(const SeqlenInfo& seqlen, i32 head, i32 j) const {
    bool is_bad = false;
#pragma unroll
    for (i32 i = 0; i < kOwn; ++i) {
      if (own_row(i) >= kRows) continue;
      const bool is_key = j * kRows + own_row(i) < seqlen.shape.kv_len;
      const bool has_page = is_key && !is_bad_page(found_rows[i].id, p.num_pages);
      is_bad |= is_key && !has_page;
      const i64 k = 2 * p.k.offset(found_rows[i].id, head, found_rows[i].row, 0);
      const i64 v = 2 * p.v.offset(found_rows[i].id, head, found_rows[i].row, 0);
      const u64 k_row = has_page ? reinterpret_cast<u64>(p.k.data) + static_cast<u64>(k) : 0;
      const u64 v_row = has_page ? reinterpret_cast<u64>(p.v.data) + static_cast<u64>(v) : 0;
      const u32 to = shared.found().address(at) + offset_of(own_row(i));
      ptx::store_shared_x2(to, {{u32(k_row), u32(k_row >> 32)}});
      ptx::store_shared_x2(to + kRows * 8, {{u32(v_row), u32(v_row >> 32)}});
    }
    return is_bad;
  }

  void find_blocks(const QueryBlock& block, const KeyBlocks& blocks, const SeqlenInfo& seqlen,
                   u32 count) {
    const i32 head = block.head / (params.heads_q / params.heads_kv);
    look_up(block, seqlen, blocks.all_end - 1);
#pragma unroll 1
    for (i32 j = blocks.all_end - 1; j >= blocks.all_begin; --j) {
      ptx::mbarrier_wait(shared.found().empty(at), at.phase ^ 1);
      report_bad_page(shared, p, count, store_rows(seqlen, head, j));
      look_up(block, seqlen, j - 1);
      ptx::warp_sync();
      if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(shared.found().full(at));
      at.advance();
    }
  }

  void run() {
    each_work_tile(shared, params,
                   [&](const QueryBlock& block, const KeyBlocks& blocks, const SeqlenInfo& seqlen,
                       u32 count) { find_blocks(block, blocks, seqlen, count); });
  }
};

// A warp that copies them, 16 bytes a lane, and writes as the copy engine would. Eight lanes have a
// row of 64 dims, so that it copies four rows at once.
template <ForwardSm90Config kConfig, bool kOfV>
struct RowProducer {
  static constexpr i32 kRows = kConfig.kv_rows;
  static constexpr i32 kDims = kConfig.chunked(kOfV ? kConfig.d_v : kConfig.d_qk);
  static constexpr i32 kQuadsAtOnce = 8;  // of rows, whose addresses are in registers
  // With more than two buffers a block is handed over when the next was asked for: copies of both
  // are on their way together.
  static constexpr bool kIsBehind = kConfig.stages > 2;

  ForwardProducer<kConfig> producer;
  typename ForwardStorage<kConfig>::FoundState found_at;

  static u32 lane() { return ptx::thread_index() % 32; }
  auto ring() const {
    if constexpr (kOfV)
      return producer.shared.v();
    else
      return producer.shared.k();
  }

  void copy(u32 tile, u32 found) const {
    const AttentionParams& p = producer.params.attention;
    const u32 unit = lane() % 8, own_row = lane() / 8;
    const i32 vectors = static_cast<i32>((kOfV ? p.dim_v : p.dim_qk) + 7) / 8;
    const u32 rows_at = found + own_row * (kRows / 4) * 8;
    const u32 to[2] = {tile + own_row * 128 + (unit ^ own_row) * 16,
                       tile + own_row * 128 + (unit ^ (4 + own_row)) * 16 + 512};
#pragma unroll
    for (i32 first = 0; first < kRows / 4; first += kQuadsAtOnce) {
      ptx::U32x4 rows[kQuadsAtOnce / 2];  // two addresses each
#pragma unroll
      for (i32 i = 0; i < kQuadsAtOnce / 2 && first + 2 * i < kRows / 4; ++i) {
        rows[i] = ptx::load_shared_x4(rows_at + (first + 2 * i) * 8);
      }
#pragma unroll
      for (i32 i = 0; i < kQuadsAtOnce && first + i < kRows / 4; ++i) {
        const u32 low = rows[i / 2].word[i % 2 * 2], high = rows[i / 2].word[i % 2 * 2 + 1];
        const u8* const from = reinterpret_cast<const u8*>(u64{high} << 32 | low) + unit * 16;
#pragma unroll
        for (i32 chunk = 0; chunk < kDims / 64; ++chunk) {
          ptx::cp_async_16(to[i % 2] + (first + i) / 2 * 1024 + chunk * kRows * 128,
                           from + chunk * 128, high != 0 && chunk * 8 + i32(unit) < vectors);
        }
      }
    }
    ptx::cp_async_commit();
  }

  // Buffer `landed`: all but the last kPending blocks have landed.
  template <i32 kPending>
  void hand_over(PipelineState<kConfig.stages> landed) const {
    ptx::cp_async_wait<kPending>();
    ptx::fence_proxy_async();
    ptx::warp_sync();  // all rows are there
    if (lane() == 0) ptx::mbarrier_arrive(ring().full(landed));
  }

  void load_blocks(const QueryBlock& block, const KeyBlocks& blocks, const SeqlenInfo& seqlen) {
    const i32 first = blocks.all_begin, last = blocks.all_end - 1;
    const auto found = producer.shared.found();
    auto& at = kOfV ? producer.v_at : producer.k_at;
    auto before = at;
    const bool leads = lane() == 0;
#pragma unroll 1
    for (i32 j = last; j >= first; --j) {
      if (!kOfV && leads && j == min(first + 1, last)) producer.tell_nearly_loaded();
      ptx::mbarrier_wait(found.full(found_at), found_at.phase);
      ptx::mbarrier_wait(ring().empty(at), at.phase ^ 1);
      copy(ring().address(at), found.address(found_at) + (kOfV ? kRows * 8 : 0));
      ptx::warp_sync();  // all addresses are read
      if (leads) ptx::mbarrier_arrive(found.empty(found_at));
      if (!kOfV && leads && j == last) producer.load_q(block, seqlen);
      if constexpr (kIsBehind) {
        if (j < last) hand_over<1>(before);
      } else {
        hand_over<0>(at);
      }
      before = at;
      found_at.advance();
      at.advance();
    }
    if constexpr (kIsBehind) hand_over<0>(before);
  }

  void run() {
    each_work_tile(producer.shared, producer.params,
                   [&](const QueryBlock& block, const KeyBlocks& blocks, const SeqlenInfo& seqlen,
                       u32) { load_blocks(block, blocks, seqlen); });
  }
};

}  // namespace fulmen
