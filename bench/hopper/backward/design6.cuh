// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention backward for Hopper, bf16, head dim 64 or 128: dK, dV and dQ in one persistent kernel.
// A block takes work items (head, 128 keys) by ticket. Its consumers keep K, V and the sums of dK
// and dV, and walk over the queries; dQ is added in float32 in global memory. The float32 sums live
// in a few slots, one a head, that are used over and over, so that they stay in the L2 cache: when
// all items of a head are done, spare warps round its dQ to bf16 and clear the slot, `lag` items
// later. Launched by host.cu after `prepare`, which must have filled lse2 and delta, and cleared
// the slots and the counters. All blocks of the grid must be resident at once.
#pragma once
#ifndef M64
#define M64 128
#endif
#ifndef BULK
#define BULK 1
#endif
#ifndef PING
#define PING 1
#endif
#ifndef FLUSH
#define FLUSH 1
#endif
struct BackwardParams {
  int seq, num_heads;       // rows of a head; batch * heads
  int num_blocks;           // blocks of 128 rows in a head; rows are padded to that
  int num_items, lag;       // num_heads * num_blocks; an item finishes the block `lag` items back
  int group_heads, slots;   // heads that are walked together; float32 slots for dQ
  float scale_log2, scale;  // softmax scale * log2(e), softmax scale
  const float* lse2;        // (head, padded row): log2 of the row sum; +inf for rows to leave out
  const float* delta;       // (head, padded row): sum of dO * O
  float* dq_sum;            // (slot, padded row, dim), fragment order inside a query block
  uint32_t* dq;             // (head, row, dim / 2), pairs of bf16
  int* ticket;              // next item beyond the first gridDim
  int* done;                // (head): shares of dQ that have arrived, one an item and reporter
  int* freed;               // (head): warps that have cleared their part of the slot
};
struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

template <int kHeadDim, bool kIsCausal, bool kIsRagged = false>
struct BackwardConfig {
  static constexpr int D = kHeadDim, M = D == 64 ? M64 : 64, N = 128, tickets = 4;
  static constexpr int stages = D == 64 && M == 64 ? 3 : 2, kv_stages = D == 64 && M == 64 ? 2 : 1;
  static constexpr bool causal = kIsCausal, ragged = kIsRagged;  // ragged: seq % 128 != 0
  static constexpr int chunks = D / 64;  // tiles are stored 64 columns (128 bytes) at a time
  static constexpr int q_bytes = M * D * 2, k_bytes = N * D * 2, ds_bytes = M * N * 2;
  static constexpr int row_bytes = M * 4, consumer_warps = 8;
  static constexpr bool bulk = BULK;  // dQ leaves by the copy engine, else by red from registers
  static constexpr int dq_bytes = M * D * 4 / 2;  // one warpgroup's part
  static constexpr int k_at = 0, v_at = k_at + kv_stages * k_bytes,
                       q_at = v_at + kv_stages * k_bytes;
  static constexpr int do_at = q_at + stages * q_bytes, ds_at = do_at + stages * q_bytes;
  // a warpgroup's staging area: two parts of dQ, in their place at the end dV and dK
  static constexpr int out_bytes = 2 * dq_bytes > k_bytes ? 2 * dq_bytes : k_bytes;
  static constexpr int out_at = ds_at + 2 * ds_bytes, lse_at = out_at + 2 * out_bytes;
  static constexpr int delta_at = lse_at + stages * row_bytes;
  static constexpr int ticket_at = delta_at + stages * row_bytes, bar_at = ticket_at + 16;
  static constexpr int num_bars = 3 * kv_stages + 4 * stages + 3 * tickets + 4 + 8;
  static constexpr int smem_bytes = bar_at + 8 * num_bars;
  static_assert(smem_bytes <= 232448);
  static constexpr int dq_regs = M * D / 256;
  // of 168 * 384 registers; more for the producer and setmaxnreg.inc would wait for ever
  static constexpr int producer_regs = 24, consumer_regs = producer_regs == 40 ? 232 : 240;
  static_assert(producer_regs + 2 * consumer_regs <= 3 * 168);
  static constexpr bool early_dv = M == 64, split_rows = M == 128;  // who does which part of dQ
};

// Addresses of the barriers in shared memory: X_full says to the reader that X has come, X_empty
// to the writer that it has been read.
template <class C>
struct Barriers {
  uint32_t k_full, v_full, kv_empty, q_full, q_empty, do_full, do_empty, t_full, t_empty, ds_full,
      ds_empty, item_done, dq_full, dq_empty;
  DEV explicit Barriers(uint32_t at)
      : k_full(at),
        v_full(k_full + 8 * C::kv_stages),
        kv_empty(v_full + 8 * C::kv_stages),
        q_full(kv_empty + 8 * C::kv_stages),
        q_empty(q_full + 8 * C::stages),
        do_full(q_empty + 8 * C::stages),
        do_empty(do_full + 8 * C::stages),
        t_full(do_empty + 8 * C::stages),
        t_empty(t_full + 8 * C::tickets),
        ds_full(t_empty + 8 * C::tickets),
        ds_empty(ds_full + 16),
        item_done(ds_empty + 16),
        dq_full(item_done + 8 * C::tickets),
        dq_empty(dq_full + 32) {}
  DEV void init() const {
    auto each = [](uint32_t bar, int n, int count) {
      for (int i = 0; i < n; i++) mbar_init(bar + 8 * i, count);
    };
    each(k_full, C::kv_stages, 1), each(v_full, C::kv_stages, 1), each(kv_empty, C::kv_stages, 2);
    each(q_full, C::stages, 1), each(q_empty, C::stages, 2);
    each(do_full, C::stages, 1), each(do_empty, C::stages, 2);
    each(t_full, C::tickets, 1), each(t_empty, C::tickets, C::bulk ? 4 : 3);
    each(ds_full, 2, C::consumer_warps), each(ds_empty, 2, 2);
    each(dq_full, 4, 4), each(dq_empty, 4, 1);  // [warpgroup][2]
    each(item_done, C::tickets, C::consumer_warps);
    fence_mbarrier_init();
  }
};

// A position in a ring of stages.
template <int kStages>
struct Ring {
  int stage = 0, phase = 0;
  DEV void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

struct Item {
  int head, block;
};
// Items go through groups of heads; inside a group the first key block (the longest one under the
// causal mask) of every head comes first.
DEV Item locate(const BackwardParams& p, int item) {
  const int in_group = p.group_heads * p.num_blocks, group = item / in_group, r = item % in_group;
  const int heads = min(p.group_heads, p.num_heads - group * p.group_heads);
  return {group * p.group_heads + r % heads, r / heads};
}

// The query blocks that a key block needs, in the order in which it takes them. Without a mask each
// key block starts elsewhere, so that blocks do not add to the same dQ at the same time.
template <class C>
struct QueryWalk {
  int begin, end, shift;
  DEV QueryWalk(const BackwardParams& p, int key_block)
      : begin(C::causal ? key_block * C::N / C::M : 0),
        end((p.seq + C::M - 1) / C::M),
        shift(C::causal ? 0 : key_block * C::N / C::M % end) {}
  DEV int at(int i) const {
    const int m = i + shift;
    return m >= end ? m - end : m;
  }
};

// dQ = bf16(scale * sum): one block of 128 rows, by all consumer warps.
template <class C>
DEV void finish_dq(const BackwardParams& p, int item) {
  constexpr int D = C::D, M = C::M, kPairs = M * D / 2048, kSteps = D / 2 / C::consumer_warps;
  const Item it = locate(p, item);
  while (load_acquire(p.done + it.head) != p.num_blocks * (C::bulk ? 2 : 1)) pause_ns(64);
  const bool reuse = it.head + p.slots < p.num_heads;
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  float* sum =
      p.dq_sum + (size_t(it.head % p.slots) * p.num_blocks + it.block) * 128 * D + lane * 4;
  uint32_t* out = p.dq + (size_t(it.head) * p.seq + it.block * 128 + lane / 4) * (D / 2) + lane % 4;
  const int rows = p.seq - it.block * 128 - lane / 4;
  // 16 rows by 16 columns a step; a slab is one warpgroup's part of a query block
  auto from = [&](int k) {
    const int v = k * C::consumer_warps + warp;
    return sum + v / 4 / kPairs * (M * D / 2) + v / 4 % kPairs * 1024 + v % 4 * 128;
  };
  float4 a[kSteps], b[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; k++) a[k] = load_l2(from(k)), b[k] = load_l2(from(k) + 512);
#pragma unroll
  for (int k = 0; k < kSteps; k++) {
    const int v = k * C::consumer_warps + warp, slab = v / 4 / kPairs, w = slab % 2;
    const int row = slab / 2 * M + (C::split_rows ? w * 64 : 0) + v % 4 * 16;
    uint32_t* to = out + row * (D / 2) + v / 4 % kPairs * 8 + (C::split_rows ? 0 : w * (D / 4));
    if (!C::ragged || row < rows)
      to[0] = pack_bf16(a[k].x * p.scale, a[k].y * p.scale),
      to[4] = pack_bf16(b[k].x * p.scale, b[k].y * p.scale);
    to += 8 * (D / 2);
    if (!C::ragged || row + 8 < rows)
      to[0] = pack_bf16(a[k].z * p.scale, a[k].w * p.scale),
      to[4] = pack_bf16(b[k].z * p.scale, b[k].w * p.scale);
    if (reuse) store_l2(from(k), 0, 0, 0, 0), store_l2(from(k) + 512, 0, 0, 0, 0);
  }
  if (reuse) {
    __syncwarp();
    if (lane == 0) fence_gpu(), add_release(p.freed + it.head, 1);
  }
}

// One thread of warp 1: tells the grid that an item's dQ has arrived, so that the consumers need
// not wait for their reductions.
template <class C>
DEV void run_reporter(const BackwardParams& p, uint32_t smem, const Barriers<C>& bar) {
  Ring<C::tickets> ticket;
  for (;;) {
    mbar_wait(bar.t_full + 8 * ticket.stage, ticket.phase);
    const int t = load_shared(smem + C::ticket_at + 4 * ticket.stage);
    if (t >= p.num_items + p.lag) break;
    if (t < p.num_items) {
      mbar_wait(bar.item_done + 8 * ticket.stage, ticket.phase);
      fence_gpu();
      add_release(p.done + locate(p, t).head, 1);
    }
    mbar_arrive(bar.t_empty + 8 * ticket.stage);
    ticket.next();
  }
}

// One thread for each warpgroup: adds its parts of dQ to the sums, and tells the grid when those of
// an item have arrived.
template <class C>
DEV void run_reducer(const BackwardParams& p, uint32_t smem, const Barriers<C>& bar, int w) {
  Ring<C::tickets> ticket;
  Ring<2> ring;
  for (;;) {
    mbar_wait(bar.t_full + 8 * ticket.stage, ticket.phase);
    const int t = load_shared(smem + C::ticket_at + 4 * ticket.stage);
    mbar_arrive(bar.t_empty + 8 * ticket.stage);
    ticket.next();
    if (t >= p.num_items + p.lag) break;
    if (t >= p.num_items) continue;
    const Item it = locate(p, t);
    const QueryWalk<C> walk(p, it.block);
    float* sum =
        p.dq_sum + size_t(it.head % p.slots) * p.num_blocks * 128 * C::D + w * (C::M * C::D / 2);
    for (int i = walk.begin; i < walk.end; i++) {
      const int at = 8 * (2 * w + ring.stage);
      mbar_wait(bar.dq_full + at, ring.phase);
      if (FLUSH)
        bulk_reduce(sum + size_t(walk.at(i)) * C::M * C::D,
                    smem + C::out_at + w * C::out_bytes + ring.stage * C::dq_bytes, C::dq_bytes);
      bulk_commit();
      bulk_wait_read();
      mbar_arrive(bar.dq_empty + at);
      ring.next();
    }
    bulk_wait();
    fence_gpu();
    add_release(p.done + it.head, 1);
  }
}

template <class C>
DEV void run_producer(const BackwardParams& p, uint32_t smem, const Barriers<C>& bar,
                      const CUtensorMap* mq, const CUtensorMap* mk, const CUtensorMap* mv,
                      const CUtensorMap* mdo) {
  Ring<C::stages> ring;
  Ring<C::tickets> ticket;
  Ring<C::kv_stages> kv;
  const int padded = p.num_blocks * 128;
  for (int t = blockIdx.x;;) {
    mbar_wait(bar.t_empty + 8 * ticket.stage, ticket.phase ^ 1);
    store_shared(smem + C::ticket_at + 4 * ticket.stage, t);
    mbar_arrive(bar.t_full + 8 * ticket.stage);
    ticket.next();
    if (t >= p.num_items + p.lag) break;
    if (t < p.num_items) {
      const Item it = locate(p, t);
      for (int c = 0; c < C::chunks; c++) {
        tma_prefetch(mk, c * 64, it.block * C::N, it.head);
        tma_prefetch(mv, c * 64, it.block * C::N, it.head);
      }
      if (it.head >= p.slots)  // the slot is clear again
        while (load_acquire(p.freed + it.head - p.slots) != p.num_blocks * C::consumer_warps)
          pause_ns(64);
      const QueryWalk<C> walk(p, it.block);
      for (int i = walk.begin; i < walk.end; i++) {
        const int m = walk.at(i), s = ring.stage;
        const float* lse = p.lse2 + size_t(it.head) * padded + m * C::M;
        const float* delta = p.delta + size_t(it.head) * padded + m * C::M;
        mbar_wait(bar.q_empty + 8 * s, ring.phase ^ 1);
        mbar_expect(bar.q_full + 8 * s, C::q_bytes + C::row_bytes);
        for (int c = 0; c < C::chunks; c++)
          tma_load(smem + C::q_at + s * C::q_bytes + c * C::M * 128, mq, bar.q_full + 8 * s, c * 64,
                   m * C::M, it.head);
        bulk_load(smem + C::lse_at + s * C::row_bytes, lse, C::row_bytes, bar.q_full + 8 * s);
        if (i == walk.begin) {
          mbar_wait(bar.kv_empty + 8 * kv.stage, kv.phase ^ 1);
          mbar_expect(bar.k_full + 8 * kv.stage, C::k_bytes);
          for (int c = 0; c < C::chunks; c++)
            tma_load(smem + C::k_at + kv.stage * C::k_bytes + c * C::N * 128, mk,
                     bar.k_full + 8 * kv.stage, c * 64, it.block * C::N, it.head);
        }
        mbar_wait(bar.do_empty + 8 * s, ring.phase ^ 1);
        mbar_expect(bar.do_full + 8 * s, C::q_bytes + C::row_bytes);
        for (int c = 0; c < C::chunks; c++)
          tma_load(smem + C::do_at + s * C::q_bytes + c * C::M * 128, mdo, bar.do_full + 8 * s,
                   c * 64, m * C::M, it.head);
        bulk_load(smem + C::delta_at + s * C::row_bytes, delta, C::row_bytes, bar.do_full + 8 * s);
        if (i == walk.begin) {
          mbar_expect(bar.v_full + 8 * kv.stage, C::k_bytes);
          for (int c = 0; c < C::chunks; c++)
            tma_load(smem + C::v_at + kv.stage * C::k_bytes + c * C::N * 128, mv,
                     bar.v_full + 8 * kv.stage, c * 64, it.block * C::N, it.head);
          kv.next();
        }
        ring.next();
      }
    }
    t = gridDim.x + atomicAdd(p.ticket, 1);  // late, so that the longest-first order balances
  }
}

template <class C>
DEV void run_consumer(const BackwardParams& p, uint32_t smem, const Barriers<C>& bar,
                      const CUtensorMap* mdk, const CUtensorMap* mdv) {
  constexpr int D = C::D, M = C::M, N = C::N;
  const int w = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0), tid = threadIdx.x % 128;
  const int lane = tid % 32, warp = tid / 32;
  const uint32_t out = smem + C::out_at + w * C::out_bytes;
  Ring<C::stages> ring;
  Ring<C::tickets> ticket;
  Ring<2> ds_ring, dq_ring;
  Ring<C::kv_stages> kv;

  // acc = K Q^T or V dO^T: 64 keys of this warpgroup, M queries
  auto keys_by_queries = [&](float (&acc)[M / 2], uint32_t slab, uint32_t tile) {
    wg_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<0>(acc, slab + (((k / 4) * N * 128 + (k % 4) * 32) >> 4),
                  desc(tile, 16) + (((k / 4) * M * 128 + (k % 4) * 32) >> 4), k > 0);
    wg_commit();
  };
  // acc += P^T dO or dS^T Q
  auto keys_by_dims = [&](float (&acc)[D / 2], const uint32_t (&a)[M / 4], uint32_t tile,
                          bool add) {
    wg_fence();
#pragma unroll
    for (int k = 0; k < M / 16; k++)
      wgmma_rs<1>(acc, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3],
                  desc(tile + k * 2048, M * 128), k > 0 || add);
    wg_commit();
  };
  // dq = dS K: M 128 splits the rows between the warpgroups, M 64 the columns
  auto queries_by_dims = [&](float (&acc)[C::dq_regs], uint32_t ds, uint32_t k_tile) {
    const uint32_t a = desc(ds + (C::split_rows ? w * 64 * 128 : 0), 16);
    const uint32_t b = desc(k_tile + (C::split_rows ? 0 : D == 128 ? w * N * 128 : w * 64), 16);
    wg_fence();
#pragma unroll
    for (int k = 0; k < N / 16; k++)
      wgmma_ss<1>(acc, a + (((k / 4) * M * 128 + (k % 4) * 32) >> 4), b + ((k * 2048) >> 4), k > 0);
    wg_commit();
  };

#if PING
  if (w == 1) bar_arrive(6, 256);
#endif
  for (;;) {
    mbar_wait(bar.t_full + 8 * ticket.stage, ticket.phase);
    const int t = load_shared(smem + C::ticket_at + 4 * ticket.stage);
    if (C::bulk && tid == 0) bulk_wait_read();  // dK and dV have left the staging area
    bar_sync(4 + w, 128);
    if (tid == 0) mbar_arrive(bar.t_empty + 8 * ticket.stage);
    const uint32_t item_done = bar.item_done + 8 * ticket.stage;
    ticket.next();
    if (t >= p.num_items + p.lag) break;
    if (t >= p.lag) finish_dq<C>(p, t - p.lag);
    if (t >= p.num_items) continue;  // no more keys, only dQ to finish
    const Item it = locate(p, t);
    const QueryWalk<C> walk(p, it.block);
    const int key = it.block * N + w * 64 + warp * 16 + lane / 4;  // and key + 8
    // keys see queries from first_query on
    const int first_query[2] = {C::ragged && key >= p.seq ? 1 << 30
                                : C::causal               ? key
                                                          : 0,
                                C::ragged && key + 8 >= p.seq ? 1 << 30
                                : C::causal                   ? key + 8
                                                              : 0};
    const bool ragged = C::ragged && (it.block + 1) * N > p.seq;
    float* dq_sum =
        p.dq_sum + size_t(it.head % p.slots) * p.num_blocks * 128 * D + w * (M * D / 2) + tid * 4;
    const uint32_t k_tile = smem + C::k_at + kv.stage * C::k_bytes;
    const uint32_t k_slab = desc(k_tile + w * 64 * 128, 16);  // this warpgroup's 64 keys
    const uint32_t v_slab = desc(smem + C::v_at + kv.stage * C::k_bytes + w * 64 * 128, 16);
    float dk[D / 2], dv[D / 2];

    // S = -inf where the mask hides it
    auto apply_mask = [&](auto& s, int i) {
      const int m = walk.at(i);
      if (ragged || (C::causal && m * M < it.block * N + w * 64 + 64)) {
#pragma unroll
        for (int k = 0; k < M / 2; k++) {
          const int query = m * M + (k / 4) * 8 + 2 * (lane % 4) + (k & 1);
          if (query < first_query[(k >> 1) & 1]) s[k] = -INFINITY;
        }
      }
    };
    // P = exp2(S * scale - lse)
    auto exponentials = [&](auto& pr, auto& s, int stage) {
#pragma unroll
      for (int j = 0; j < M / 8; j++) {
        const float2 l =
            load_shared2(smem + C::lse_at + stage * C::row_bytes + (j * 8 + 2 * (lane % 4)) * 4);
        pr[4 * j] = ex2(fmaf(s[4 * j], p.scale_log2, -l.x));
        pr[4 * j + 1] = ex2(fmaf(s[4 * j + 1], p.scale_log2, -l.y));
        pr[4 * j + 2] = ex2(fmaf(s[4 * j + 2], p.scale_log2, -l.x));
        pr[4 * j + 3] = ex2(fmaf(s[4 * j + 3], p.scale_log2, -l.y));
      }
    };
    // dS = P * (dP - delta), rounded
    auto form_ds = [&](uint32_t (&ds)[M / 4], float (&pr)[M / 2], float (&dp)[M / 2], int stage) {
#pragma unroll
      for (int j = 0; j < M / 8; j++) {
        const float2 d =
            load_shared2(smem + C::delta_at + stage * C::row_bytes + (j * 8 + 2 * (lane % 4)) * 4);
        ds[2 * j] = pack_bf16(pr[4 * j] * (dp[4 * j] - d.x), pr[4 * j + 1] * (dp[4 * j + 1] - d.y));
        ds[2 * j + 1] =
            pack_bf16(pr[4 * j + 2] * (dp[4 * j + 2] - d.x), pr[4 * j + 3] * (dp[4 * j + 3] - d.y));
      }
    };
    auto round_p = [&](uint32_t (&out)[M / 4], float (&pr)[M / 2]) {
#pragma unroll
      for (int k = 0; k < M / 4; k++) out[k] = pack_bf16(pr[2 * k], pr[2 * k + 1]);
    };
    // dS^T of this warpgroup -> dS in shared memory, for the dQ product of both, a step later
    auto share_ds = [&](uint32_t (&ds)[M / 4]) {
      mbar_wait(bar.ds_empty + 8 * ds_ring.stage, ds_ring.phase ^ 1);
#pragma unroll
      for (int j = 0; j < M / 16; j++) {
        const int row = 16 * j + 8 * (lane / 16) + lane % 8, unit = 2 * warp + ((lane >> 3) & 1);
        stmatrix4t(smem + C::ds_at + ds_ring.stage * C::ds_bytes + w * M * 128 + row * 128 +
                       ((unit ^ (lane & 7)) << 4),
                   ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) mbar_arrive(bar.ds_full + 8 * ds_ring.stage);
      ds_ring.next();
    };
    auto add_dq = [&](float (&dq)[C::dq_regs], int i) {
      if constexpr (C::bulk) {
        const uint32_t at = 8 * (2 * w + dq_ring.stage);
        mbar_wait(bar.dq_empty + at, dq_ring.phase ^ 1);
#pragma unroll
        for (int j = 0; j < C::dq_regs / 4; j++)
          store_shared4(out + dq_ring.stage * C::dq_bytes + j * 2048 + tid * 16, dq[4 * j],
                        dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        fence_async();
        __syncwarp();
        if (lane == 0) mbar_arrive(bar.dq_full + at);
        dq_ring.next();
      } else {
        float* to = dq_sum + size_t(walk.at(i)) * M * D;
#pragma unroll
        for (int j = 0; j < C::dq_regs / 4; j++)
          red_add4(to + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
      }
    };
    auto release = [&](uint32_t b) {
      if (tid == 0) mbar_arrive(b);
    };
    const uint32_t q0 = smem + C::q_at, do0 = smem + C::do_at;

    float pr[M / 2];  // S is carried into a step, P takes its place
    // The warpgroups meet only over dS, and dQ takes it a step late: so one can do its
    // exponentials while the other keeps the tensor cores busy.
    auto step = [&](int i, auto is_first) {
      constexpr bool first = decltype(is_first)::value;
      const int s = ring.stage;
      const bool more = i + 1 < walk.end;
      const uint32_t old = ds_ring.stage ^ 1, old_phase = ds_ring.phase ^ ds_ring.stage ^ 1;
      uint32_t ds[M / 4];
      mbar_wait(bar.do_full + 8 * s, ring.phase);
      if constexpr (C::causal || C::ragged) apply_mask(pr, i);
      {
        uint32_t pb[M / 4];
        float dp[M / 2];
        keys_by_queries(dp, v_slab, do0 + s * C::q_bytes);  // dP^T = V dO^T
        exponentials(pr, pr, s);
        if constexpr (C::early_dv) {
          round_p(pb, pr);
          keys_by_dims(dv, pb, do0 + s * C::q_bytes, !first);  // dV += P^T dO, under dS
          wg_wait<1>();
          form_ds(ds, pr, dp, s);
        } else {
          wg_wait<0>();
          form_ds(ds, pr, dp, s);
          round_p(pb, pr);
          keys_by_dims(dv, pb, do0 + s * C::q_bytes, !first);  // dV += P^T dO
        }
        share_ds(ds);
        wg_wait<0>();  // frees the registers of P
        release(bar.do_empty + 8 * s);
      }
      ring.next();
      const int n = ring.stage;
      float s2[M / 2], dq[C::dq_regs];
#if PING
      bar_sync(6 + w, 256);
#endif
      if constexpr (!first) {
        mbar_wait(bar.ds_full + 8 * old, old_phase);
        queries_by_dims(dq, smem + C::ds_at + old * C::ds_bytes,
                        k_tile);  // dQ = dS K of the step before
      }
      if (more) mbar_wait(bar.q_full + 8 * n, ring.phase);
      keys_by_queries(s2, k_slab, q0 + n * C::q_bytes);   // next S^T = K Q^T (the last is not used)
      keys_by_dims(dk, ds, q0 + s * C::q_bytes, !first);  // dK += dS^T Q
#if PING
      bar_arrive(7 - w, 256);
#endif
      if constexpr (!first) {
        wg_wait<2>();
        release(bar.ds_empty + 8 * old);
        add_dq(dq, i - 1);
      }
      wg_wait<0>();
      release(bar.q_empty + 8 * s);
#pragma unroll
      for (int k = 0; k < M / 2; k++) pr[k] = s2[k];
    };

    mbar_wait(bar.q_full + 8 * ring.stage, ring.phase);
    mbar_wait(bar.k_full + 8 * kv.stage, kv.phase);
    {
      float s2[M / 2];
      keys_by_queries(s2, k_slab, q0 + ring.stage * C::q_bytes);
      wg_wait<0>();
#pragma unroll
      for (int k = 0; k < M / 2; k++) pr[k] = s2[k];
    }
    mbar_wait(bar.v_full + 8 * kv.stage, kv.phase);
    int i = walk.begin;
    step(i++, True{});
#pragma unroll 1
    for (; i < walk.end; i++) step(i, False{});
    {
      const uint32_t old = ds_ring.stage ^ 1;
      float dq[C::dq_regs];
      mbar_wait(bar.ds_full + 8 * old, ds_ring.phase ^ ds_ring.stage ^ 1);
      queries_by_dims(dq, smem + C::ds_at + old * C::ds_bytes, k_tile);
      wg_wait<0>();
      release(bar.ds_empty + 8 * old);
      add_dq(dq, walk.end - 1);
    }
    release(bar.kv_empty + 8 * kv.stage);
    kv.next();
    if constexpr (!C::bulk) {
      __syncwarp();
      if (lane == 0) mbar_arrive(item_done);
    }

    // dK, dV -> bf16 -> shared memory -> global memory
    if constexpr (C::bulk) {  // the parts of dQ have left the staging area
      Ring<2> r = dq_ring;
      for (int k = 0; k < 2; k++, r.next())
        mbar_wait(bar.dq_empty + 8 * (2 * w + r.stage), r.phase ^ 1);
    } else {
      if (tid == 0) bulk_wait_read();
      bar_sync(4 + w, 128);
    }
    auto stage_out = [&](float (&acc)[D / 2], uint32_t to, float scale) {
#pragma unroll
      for (int j = 0; j < D / 16; j++) {
        const int row = warp * 16 + lane % 16, unit = j * 2 + lane / 16;
        stmatrix4(to + (unit / 8) * 64 * 128 + row * 128 + (((unit % 8) ^ (row & 7)) << 4),
                  pack_bf16(acc[8 * j] * scale, acc[8 * j + 1] * scale),
                  pack_bf16(acc[8 * j + 2] * scale, acc[8 * j + 3] * scale),
                  pack_bf16(acc[8 * j + 4] * scale, acc[8 * j + 5] * scale),
                  pack_bf16(acc[8 * j + 6] * scale, acc[8 * j + 7] * scale));
      }
    };
    stage_out(dv, out, 1.f);
    stage_out(dk, out + C::k_bytes / 2, p.scale);
    fence_async();
    bar_sync(4 + w, 128);
    if (tid == 0) {
      for (int c = 0; c < C::chunks; c++) {
        tma_store(mdv, out + c * 64 * 128, c * 64, it.block * N + w * 64, it.head);
        tma_store(mdk, out + C::k_bytes / 2 + c * 64 * 128, c * 64, it.block * N + w * 64, it.head);
      }
      bulk_commit();
    }
  }
  if (tid == 0) bulk_wait();
}

template <class C>
__global__ void __launch_bounds__(384, 1)
    backward(const __grid_constant__ CUtensorMap mq, const __grid_constant__ CUtensorMap mk,
             const __grid_constant__ CUtensorMap mv, const __grid_constant__ CUtensorMap mdo,
             const __grid_constant__ CUtensorMap mdk, const __grid_constant__ CUtensorMap mdv,
             const BackwardParams p) {
  SHARED_RAW
  const uint32_t smem = smem_u32(raw);  // aligned to 1024 bytes
  const Barriers<C> bar(smem + C::bar_at);
  if (threadIdx.x == 0) bar.init();
  __syncthreads();
  grid_dependency_wait();
  const int wg = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  if (wg == 0) {
    regs_dec<C::producer_regs>();
    if (threadIdx.x == 0) run_producer<C>(p, smem, bar, &mq, &mk, &mv, &mdo);
    if (C::bulk) {
      if (threadIdx.x == 32 || threadIdx.x == 64)
        run_reducer<C>(p, smem, bar, threadIdx.x / 32 - 1);
    } else {
      if (threadIdx.x == 32) run_reporter<C>(p, smem, bar);
    }
  } else {
    regs_inc<C::consumer_regs>();
    run_consumer<C>(p, smem, bar, &mdk, &mdv);
  }
}

// delta = sum of dO * O, lse2 = lse * log2(e); clears the slots and the counters.
template <int D>
__global__ void __launch_bounds__(256)
    prepare(const uint4* o, const uint4* d_o, const float* lse, float* lse2, float* delta, int seq,
            int padded, int num_heads, float4* sums, int num_sums, int* counters,
            int num_counters) {
  grid_dependents_launch();
  constexpr int kThreads = D / 8;  // threads a row, 16 bytes each
  const int id = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
  for (int i = id; i < num_counters; i += all) counters[i] = 0;
  const float4 zero = {0, 0, 0, 0};
  for (int i = id; i < num_sums; i += all) sums[i] = zero;
  auto dot = [](uint32_t a, uint32_t b) {
    auto lo = [](uint32_t x) { return __uint_as_float(x << 16); };
    auto hi = [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); };
    return lo(a) * lo(b) + hi(a) * hi(b);
  };
  const int rows = num_heads * padded, lane = threadIdx.x % kThreads;
#pragma unroll 4
  for (int r = id / kThreads; r < rows; r += all / kThreads) {
    const int head = r / padded, row = r % padded;
    float sum = 0;
    if (row < seq) {
      const size_t at = (size_t(head) * seq + row) * kThreads + lane;
      const uint4 a = o[at], b = d_o[at];
      sum = dot(a.x, b.x) + dot(a.y, b.y) + dot(a.z, b.z) + dot(a.w, b.w);
    }
#pragma unroll
    for (int x = 1; x < kThreads; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
    if (lane == 0) {
      const float l = row < seq ? lse[size_t(head) * seq + row] : -INFINITY;
      delta[r] = sum;
      lse2[r] = l == -INFINITY ? INFINITY : l * 1.4426950408889634f;
    }
  }
}
