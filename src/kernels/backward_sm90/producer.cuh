// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The loaders of backward_sm90, two threads that talk to the copy engine: one claims items, tells
// everybody, and loads K and Q with what rows have kept; the other loads V and dO with delta. K and
// V of an item come once, Q and dO for every step. A thread has 24 registers, and one for both took
// longer for a step than the consumers.
#pragma once

#include "kernels/backward_sm90/dq_accum.cuh"
#include "kernels/backward_sm90/storage.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// What both loaders know of an item.
template <BackwardConfig kConfig>
struct BackwardTiles {
  const BackwardParams& params;
  const BackwardItem& item;
  i32 kv_head = item.line % params.heads_kv;
  i32 batch = batch_of<kConfig>(params, item.line);
  u32 first_kept = u32(first_kept_row<kConfig>(params, item.line, item.q_begin));

  static void load(const TensorMap& map, u32 tile, u32 full, i32 rows, i32 row, i32 head,
                   i32 batch) {
#pragma unroll
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch);
    }
  }
  // Q or dO of a step.
  void load_queries(const TensorMap& map, u32 tile, u32 full, const BackwardStep& step) const {
    load(map, tile, full, kConfig.q_rows, item.q_begin + step.q_block * kConfig.q_rows,
         kv_head * params.group_size + step.head, batch);
  }
  // K or V.
  i32 first_key() const { return item.kv_block * kConfig.kv_rows(); }
  void load_keys(const TensorMap& map, u32 tile, u32 full) const {
    load(map, tile, full, kConfig.kv_rows(), item.kv_begin + first_key(), kv_head, batch);
  }
  void prefetch_keys(const TensorMap& map) const {
#pragma unroll
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      ptx::tma_prefetch(map, d, item.kv_begin + first_key(), kv_head, batch);
    }
  }

  // A step's first row among those that are kept.
  u32 kept(const BackwardStep& step) const {
    return first_kept + step.head * u32(params.rows_of_head) + step.q_block * kConfig.q_rows;
  }

  // Where a tile is announced: at the cleaner's barrier if rows of nobody come with it.
  static u32 landing(u32 full, u32 landed, i32 rows, i32 rows_left) {
    return kConfig.sequences && rows_left < rows ? landed : full;
  }
  u32 landing_of_queries(u32 full, u32 landed, const BackwardStep& step) const {
    return landing(full, landed, kConfig.q_rows, item.shape.q_len - step.q_block * kConfig.q_rows);
  }
  u32 landing_of_keys(u32 full, u32 landed) const {
    return landing(full, landed, kConfig.kv_rows(), item.shape.kv_len - first_key());
  }
};

template <BackwardConfig kConfig>
struct BackwardLoader {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::StageCursor at;
  typename Shared::KvCursor kv_at;

  // Blocks of queries, `count` from `begin` on, that see all of a warpgroup's 64 keys.
  struct Full {
    i32 begin, count;
  };
  Full full_blocks(const BackwardItem& item, u32 warpgroup) const {
    const i32 key = item.kv_block * kConfig.kv_rows() + kConfig.first_key(warpgroup);
    if (key + 64 > item.shape.kv_len) return {0, 0};
    Interval full = seeing_blocks<kConfig>(params.mask, item.shape, key, 64).full;
    if constexpr (kConfig.documents) {
      const BackwardVisit& visit = visit_of<kConfig>(params, item);
      full.begin = max<i64>(full.begin, visit.full_begin[warpgroup]);
      full.end = max(full.begin, min<i64>(full.end, visit.full_end[warpgroup]));
    }
    return {i32(full.begin), i32(full.size())};
  }

  void load_k(const BackwardTiles<kConfig>& tiles) const {
    const auto k = shared.k();
    const u32 full = tiles.landing_of_keys(k.full(kv_at), shared.k_landed());
    ptx::mbarrier_wait(k.empty(kv_at), kv_at.parity ^ 1);
    ptx::mbarrier_arrive_expect(full, kConfig.k_bytes());
    tiles.load_keys(params.maps.k, k.address(kv_at), full);
  }

  void load_item(const BackwardItem& item, const BackwardWalk& walk) {
    const BackwardTiles<kConfig> tiles{params, item};
    tiles.prefetch_keys(params.maps.k);  // still in use by the item before: to the L2 meanwhile
    if (kConfig.dq && !kConfig.sequences && item.line >= params.num_slots) {
      // its sums are clear again
      ptx::await(params.freed + item.line - params.num_slots, params.num_kv_blocks);
    }
    const Full full[2] = {full_blocks(item, 0), full_blocks(item, 1)};
    const u32 first_tile = first_dq_tile<kConfig>(params, item.line, item.q_begin);
    const auto q = shared.q();
    BackwardStep step(walk);
#pragma unroll 1
    for (i32 left = walk.num_steps; left > 0; --left, step.advance(walk)) {
      const u32 q_full = tiles.landing_of_queries(q.full(at), shared.q_landed(at), step);
      u32 flags = step.q_block;
      if (left == 1) flags |= BackwardStepMail::kLast;
      for (u32 w = 0; w < 2; ++w) {
        if (u32(step.q_block - full[w].begin) >= u32(full[w].count)) {
          flags |= BackwardStepMail::kPartial << w;
        }
      }
      const u32 tile =
          kConfig.dq
              ? first_tile + u32(step.head) * dq_tiles_of_head<kConfig>(params) + u32(step.q_block)
              : u32(tiles.kv_head * params.group_size + step.head);
      const u32 kept = tiles.kept(step);
      ptx::mbarrier_wait(q.empty(at), at.parity ^ 1);
      shared.write_step(at, {tile, flags});
      ptx::mbarrier_arrive_expect(q_full, kConfig.q_bytes() + kConfig.row_bytes());
      tiles.load_queries(params.maps.q, q.address(at), q_full, step);
      ptx::bulk_load(shared.rows(at), params.rows + (kConfig.has_stats ? kept_row(kept) : kept),
                     kConfig.row_bytes(), q_full);
      if (left == walk.num_steps) load_k(tiles);
      at.advance();
    }
    kv_at.advance();
  }

  // What claim `index` asks for; waits until the dQ to be rounded is complete.
  BackwardMail mail_of(const BackwardClaims& claims, i32 index) const {
    BackwardMail mail{BackwardMail::kEnd, {}, {-1, 0, 0, 1, 0, 0}};
    if (index >= claims.all()) return mail;
    mail.num_steps = BackwardMail::kNoItem;
    if (index < claims.of_items()) mail.item = claimed_item<kConfig>(params, claims, index);
    const i32 rounded = claims.rounded(index);
    if (kConfig.dq && rounded >= 0) {
      const BackwardItem before = backward_item<kConfig>(params, rounded);
      ptx::await(params.done + before.line, claims_of_line<kConfig>(params, before));
      mail.rounding = rounding_of(params, before);
    }
    return mail;
  }

  void run() {
    typename Shared::MailCursor mail_at;
    const BackwardClaims claims = backward_claims<kConfig>(params);
#pragma unroll 1
    for (;;) {
      // Claims late, so that longest-first balances.
      const i32 index = ptx::atomic_add(params.next_item, 1);
      BackwardMail mail = mail_of(claims, index);
      BackwardWalk walk{};
      if (index < claims.of_items()) {
        walk = backward_walk<kConfig>(params, mail.item);
        mail.num_steps = walk.num_steps;
      }
      ptx::mbarrier_wait(shared.mail().empty(mail_at), mail_at.parity ^ 1);
      shared.write_mail(mail_at, mail);
      ptx::mbarrier_arrive(shared.mail().full(mail_at));
      mail_at.advance();
      if (mail.num_steps == BackwardMail::kEnd) return;
      if (mail.num_steps > 0) load_item(mail.item, walk);
    }
  }
};

template <BackwardConfig kConfig>
struct BackwardDOutLoader {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DOutCursor at;
  typename Shared::KvCursor kv_at;

  void load_v(const BackwardTiles<kConfig>& tiles) const {
    const auto v = shared.v();
    const u32 full = tiles.landing_of_keys(v.full(kv_at), shared.v_landed());
    ptx::mbarrier_wait(v.empty(kv_at), kv_at.parity ^ 1);
    ptx::mbarrier_arrive_expect(full, kConfig.k_bytes());
    tiles.load_keys(params.maps.v, v.address(kv_at), full);
  }

  void load_item(const BackwardItem& item) {
    const BackwardTiles<kConfig> tiles{params, item};
    const BackwardWalk walk = backward_walk<kConfig>(params, item);
    if constexpr (kConfig.needs_dp()) tiles.prefetch_keys(params.maps.v);
    const auto dout = shared.dout();
    BackwardStep step(walk);
#pragma unroll 1
    for (i32 left = walk.num_steps; left > 0; --left, step.advance(walk)) {
      const u32 full = tiles.landing_of_queries(dout.full(at), shared.dout_landed(at), step);
      const u32 kept = tiles.kept(step);
      ptx::mbarrier_wait(dout.empty(at), at.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, kConfig.q_bytes() + kConfig.delta_bytes());
      tiles.load_queries(params.maps.dout, dout.address(at), full, step);
      ptx::bulk_load(shared.delta(at), params.delta + kept, kConfig.delta_bytes(), full);
      if (kConfig.needs_dp() && left == walk.num_steps) load_v(tiles);
      at.advance();
    }
    kv_at.advance();
  }

  void run() {
    shared.take_mail(true, [&](typename Shared::MailCursor mail_at, i32 num_steps) {
      if (num_steps > 0) load_item(shared.read_item(mail_at));
    });
  }
};

// A tile at the end of a sequence also brings rows of the next one, or of nobody, with anything in
// them: 0 times NaN would be seen. They become 0 before the consumers look. Other tiles go from the
// copy engine to the consumers.
template <BackwardConfig kConfig>
struct BackwardCleaner {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  u32 lane;
  typename Shared::StageCursor at;
  typename Shared::DOutCursor dout_at;
  typename Shared::KvCursor kv_at;
  u32 phases = 0;  // bit i: which phase of landed barrier i comes next

  // Waits for the tile, clears its rows from `begin` on, and hands it over.
  void clean(u32 landed, u32 tile, u32 full, i32 rows, i32 begin) {
    const u32 bit = (landed - shared.k_landed()) / 8;
    ptx::mbarrier_wait(landed, phases >> bit & 1);
    phases ^= 1u << bit;
#pragma unroll 1
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      for (i32 unit = max(begin, 0) * 8 + i32(lane); unit < rows * 8; unit += 32) {
        ptx::store_shared_x4(tile + d * rows * 2 + unit * 16, {});
      }
    }
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(full);
  }

  void clean_item(const BackwardItem& item, i32 num_steps) {
    const auto q = shared.q();
    const auto dout = shared.dout();
    const auto k = shared.k(), v = shared.v();
    const i32 keys = item.shape.kv_len - item.kv_block * kConfig.kv_rows();
    const bool cuts_keys = keys < kConfig.kv_rows();
    const BackwardWalk walk = backward_walk<kConfig>(params, item);
    BackwardStep step(walk);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(walk)) {
      const i32 queries = item.shape.q_len - step.q_block * kConfig.q_rows;
      const bool cuts_queries = queries < kConfig.q_rows;
      const bool cuts_keys_here = cuts_keys && i == 0;
      const auto do_at = Shared::dout_cursor(at, dout_at);
      if (cuts_queries)
        clean(shared.q_landed(at), q.address(at), q.full(at), kConfig.q_rows, queries);
      if (cuts_keys_here) {
        clean(shared.k_landed(), k.address(kv_at), k.full(kv_at), kConfig.kv_rows(), keys);
      }
      if (cuts_queries) {
        clean(shared.dout_landed(do_at), dout.address(do_at), dout.full(do_at), kConfig.q_rows,
              queries);
      }
      if (kConfig.needs_dp() && cuts_keys_here) {
        clean(shared.v_landed(), v.address(kv_at), v.full(kv_at), kConfig.kv_rows(), keys);
      }
      at.advance();
      dout_at.advance();
    }
    if (num_steps > 0) kv_at.advance();
  }

  void run() {
    shared.take_mail(lane == 0, [&](typename Shared::MailCursor mail_at, i32 num_steps) {
      if (num_steps > 0) clean_item(shared.read_item(mail_at), num_steps);
      ptx::warp_sync();
    });
  }
};

}  // namespace fulmen
