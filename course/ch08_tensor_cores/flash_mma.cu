// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention-2 on tensor cores: float16, d 64, four warps of 16 rows each, tiles of KEYS keys
// that arrive by cp.async in STAGES places. SWIZZLE: 1, or 0 to see what it is for.
#include "kernels/ptx/mma.cuh"
#include "tile.cuh"

constexpr DType kType = DType::kFloat16;
constexpr u32 kTileBytes = KEYS * kRowBytes;

struct Params {
  const u16* q;  // (row, 64)
  const u16* k;  // (row, 64)
  const u16* v;  // (row, 64)
  u32* o;        // (row, 32)    two float16 in a word
  i32 rows;      // a multiple of 64 and of KEYS
  float scale;   // 1 / sqrt(dim) * log2(e)
};

// --8<-- [start:state]
// Of a warp: 16 rows. A lane has two of them, lane / 4 and 8 more, and of each block of 8 columns
// two: numbers 0, 1 of the first row, 2, 3 of the second.
struct Rows {
  u32 Q[kDim / 16][4];
  float O[kDim / 8][4] = {};
  float m[2] = {-kInfinity<float>, -kInfinity<float>}, l[2] = {};
};
// --8<-- [end:state]

// --8<-- [start:step]
void step(Rows& rows, u32 K, u32 V, float scale) {
  const u32 lane = ptx::thread_index() % 32;
  float S[KEYS / 8][4] = {};
#pragma unroll
  for (u32 d = 0; d < kDim / 16; ++d) {  // S = Q K^T
#pragma unroll
    for (u32 j = 0; j < KEYS / 16; ++j) {  // rows of the tile are keys: columns of K^T
      const u32 key = 16 * j + lane % 8 + lane / 16 * 8;
      const ptx::U32x4 b = ptx::ldmatrix_x4(address(K, key, 2 * d + lane / 8 % 2));
      ptx::mma_m16n8k16<kType>(S[2 * j], rows.Q[d], b.word[0], b.word[1]);
      ptx::mma_m16n8k16<kType>(S[2 * j + 1], rows.Q[d], b.word[2], b.word[3]);
    }
  }
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {  // the online softmax of the lane's two rows
    float m = rows.m[r];
#pragma unroll
    for (auto& s : S) m = ptx::max(m, ptx::max(s[2 * r], s[2 * r + 1]) * scale);
    m = quad_max(m);
    const float shrink = ptx::exp2(rows.m[r] - m);
    float sum = 0;
#pragma unroll
    for (auto& s : S) {
      for (i32 i = 2 * r; i < 2 * r + 2; ++i) sum += s[i] = ptx::exp2(s[i] * scale - m);
    }
    rows.l[r] = rows.l[r] * shrink + quad_sum(sum);
#pragma unroll
    for (auto& o : rows.O) o[2 * r] *= shrink, o[2 * r + 1] *= shrink;
    rows.m[r] = m;
  }
#pragma unroll
  for (u32 j = 0; j < KEYS / 16; ++j) {  // O += P V: numbers of S, packed, are an A as they lie
    const u32 P[4] = {ptx::pack<kType>(S[2 * j][0], S[2 * j][1]),
                      ptx::pack<kType>(S[2 * j][2], S[2 * j][3]),
                      ptx::pack<kType>(S[2 * j + 1][0], S[2 * j + 1][1]),
                      ptx::pack<kType>(S[2 * j + 1][2], S[2 * j + 1][3])};
#pragma unroll
    for (u32 d = 0; d < kDim / 16; ++d) {
      const ptx::U32x4 b =
          ptx::ldmatrix_x4_trans(address(V, 16 * j + lane % 16, 2 * d + lane / 16));
      ptx::mma_m16n8k16<kType>(rows.O[2 * d], P, b.word[0], b.word[1]);
      ptx::mma_m16n8k16<kType>(rows.O[2 * d + 1], P, b.word[2], b.word[3]);
    }
  }
}
// --8<-- [end:step]

// --8<-- [start:kernel]
extern "C" __global__ void fulmen_kernel(const Params p) {
  const u32 Q = ptx::dynamic_shared(), stages = Q + kRows * kRowBytes;
  const u32 warp = ptx::thread_index() / 32, lane = ptx::thread_index() % 32;
  const i32 tiles = p.rows / KEYS;
  const auto ask = [&](i32 j) {  // K and V of a tile: one group, empty behind the last tile
    const u32 at = stages + static_cast<u32>(j % STAGES) * 2 * kTileBytes;
    if (j < tiles) copy_tile(at, p.k + j * KEYS * kDim, KEYS);
    if (j < tiles) copy_tile(at + kTileBytes, p.v + j * KEYS * kDim, KEYS);
    ptx::cp_async_commit();
  };
  copy_tile(Q, p.q + ptx::block_index() * kRows * kDim, kRows);  // in the group of tile 0
  for (i32 j = 0; j < STAGES - 1; ++j) ask(j);
  Rows rows;
  for (i32 j = 0; j < tiles; ++j) {
    ask(j + STAGES - 1);
    ptx::cp_async_wait<STAGES - 1>();  // all groups but the youngest STAGES - 1: tile j is there
    ptx::block_sync();                 // for all threads
    if (j == 0) {
#pragma unroll
      for (u32 d = 0; d < kDim / 16; ++d) {
        const ptx::U32x4 a = ptx::ldmatrix_x4(address(Q, 16 * warp + lane % 16, 2 * d + lane / 16));
        for (i32 i = 0; i < 4; ++i) rows.Q[d][i] = a.word[i];
      }
    }
    const u32 at = stages + static_cast<u32>(j % STAGES) * 2 * kTileBytes;
    step(rows, at, at + kTileBytes, p.scale);
    ptx::block_sync();  // all have used it
  }
  u32* const o = p.o + (ptx::block_index() * kRows + 16 * warp + lane / 4) * kDim / 2 + lane % 4;
#pragma unroll
  for (u32 d = 0; d < kDim / 8; ++d) {
    for (u32 r = 0; r < 2; ++r) {
      const float l = rows.l[r];
      o[r * 8 * kDim / 2 + 4 * d] =
          ptx::pack<kType>(rows.O[d][2 * r] / l, rows.O[d][2 * r + 1] / l);
    }
  }
}
// --8<-- [end:kernel]
