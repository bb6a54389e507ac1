// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-3's roles on Hopper: one warpgroup loads by the copy engine, CONSUMERS others of
// 64 rows each compute by wgmma, and mbarriers say what is full and what is empty. float16, d 64,
// tiles of KEYS keys in STAGES places. PING_PONG: 1, with two consumers, lets them take turns.
#include "kernels/ptx/tma.cuh"
#include "rows.cuh"

constexpr u32 kTileBytes = KEYS * 128, kQBytes = 64 * 128;  // rows of 64 float16

struct Params {
  TensorMap q;  // (row, 64), read in boxes of 64 rows
  TensorMap k;  // (row, 64), of KEYS rows
  TensorMap v;  // (row, 64), of KEYS rows
  u32* o;       // (row, 32)    two float16 in a word
  i32 rows;     // a multiple of 64 CONSUMERS and of KEYS
  float scale;  // 1 / sqrt(dim) * log2(e)
};

// --8<-- [start:shared]
struct Shared {
  u32 base = ptx::dynamic_shared();
  u32 q(u32 consumer) const { return base + consumer * kQBytes; }
  u32 k(u32 j) const { return q(CONSUMERS) + j % STAGES * 2 * kTileBytes; }  // of tile j
  u32 v(u32 j) const { return k(j) + kTileBytes; }
  u32 barriers() const { return q(CONSUMERS) + STAGES * 2 * kTileBytes; }
  u32 q_full() const { return barriers(); }
  u32 full(u32 j) const { return barriers() + 8 + j % STAGES * 16; }  // tile j has landed
  u32 empty(u32 j) const { return full(j) + 8; }                      // and has been used
};
// The parity of the phase of a tile's barriers: how often its place was used before.
u32 parity(u32 j) { return j / STAGES & 1; }
// --8<-- [end:shared]

// --8<-- [start:producer]
void produce(const Params& p, const Shared& shared, u32 tiles) {
  const i32 first_row = static_cast<i32>(ptx::block_index() * 64 * CONSUMERS);
  ptx::mbarrier_arrive_expect(shared.q_full(), CONSUMERS * kQBytes);
  for (u32 w = 0; w < CONSUMERS; ++w) {
    ptx::tma_load(shared.q(w), p.q, shared.q_full(), 0, first_row + static_cast<i32>(64 * w), 0, 0);
  }
  for (u32 j = 0; j < tiles; ++j) {
    ptx::mbarrier_wait(shared.empty(j), parity(j) ^ 1);  // of the tile before in this place
    ptx::mbarrier_arrive_expect(shared.full(j), 2 * kTileBytes);
    ptx::tma_load(shared.k(j), p.k, shared.full(j), 0, static_cast<i32>(j * KEYS), 0, 0);
    ptx::tma_load(shared.v(j), p.v, shared.full(j), 0, static_cast<i32>(j * KEYS), 0, 0);
  }
}
// --8<-- [end:producer]

// --8<-- [start:consumer]
void consume(const Params& p, const Shared& shared, u32 consumer, u32 tiles) {
  Rows rows;
  float S[KEYS / 2];
  if (PING_PONG && consumer == 1) ptx::bar_arrive(1, 256);  // the first turn is consumer 0's
  ptx::mbarrier_wait(shared.q_full(), 0);
  ptx::mbarrier_wait(shared.full(0), parity(0));
  issue_scores(S, shared.q(consumer), shared.k(0));
  wait_for_products();
  softmax(rows, S, p.scale);
  for (u32 j = 1; j < tiles; ++j) {
    ptx::mbarrier_wait(shared.full(j), parity(j));
    if (PING_PONG) ptx::bar_sync(1 + consumer, 256);  // our turn at the tensor cores
    issue_scores(S, shared.q(consumer), shared.k(j));
    issue_output(rows, shared.v(j - 1));  // both of them under the other's softmax
    wait_for_products();
    if (PING_PONG) ptx::bar_arrive(2 - consumer, 256);  // the other's
    ptx::mbarrier_arrive(shared.empty(j - 1));
    softmax(rows, S, p.scale);
  }
  if (PING_PONG && consumer == 0) ptx::bar_sync(1, 256);  // the last hand-over, for no turn
  ptx::wgmma_fence();
  issue_output(rows, shared.v(tiles - 1));
  wait_for_products();
  const u32 thread = ptx::thread_index() % 128;
  const u32 row =
      (ptx::block_index() * CONSUMERS + consumer) * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (u32 i = 0; i < 16; ++i) {
    const float l = rows.l[i % 2];
    p.o[(row + 8 * (i % 2)) * 32 + 4 * (i / 2) + thread % 4] =
        ptx::pack<kType>(rows.O[2 * i] / l, rows.O[2 * i + 1] / l);
  }
}
// --8<-- [end:consumer]

// --8<-- [start:kernel]
extern "C" __global__ void __launch_bounds__(128 + 128 * CONSUMERS)
    fulmen_kernel(const __grid_constant__ Params p) {
  const Shared shared;
  const u32 tiles = static_cast<u32>(p.rows / KEYS), warpgroup = ptx::thread_index() / 128;
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(shared.q_full(), 1);
    for (u32 j = 0; j < STAGES; ++j) {
      ptx::mbarrier_init(shared.full(j), 1);                 // the producer, and the bytes
      ptx::mbarrier_init(shared.empty(j), 128 * CONSUMERS);  // every thread that has used it
    }
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (warpgroup > 0) return consume(p, shared, warpgroup - 1, tiles);
  if (ptx::thread_index() == 0) produce(p, shared, tiles);
}
// --8<-- [end:kernel]
