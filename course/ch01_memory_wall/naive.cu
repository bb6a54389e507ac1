// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention as it is written down, in three launches: scores, softmax, output. The score matrix
// lies in global memory between them. One head, float32; DIM is given when it is compiled.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* q;  // (row, dim)
  const float* k;  // (row, dim)
  const float* v;  // (row, dim)
  float* s;        // (row, row)    scores, then exp(score - maximum of the row)
  float* sums;     // (row)         of the exponentials
  float* o;        // (row, dim)
  i32 rows;
  i32 step;     // 0, 1, 2
  float scale;  // 1 / sqrt(dim) * log2(e): exp(x) is computed as 2^(x log2 e), one instruction
};

// --8<-- [start:scores]
// S = scale Q K^T: a thread computes one score.
void scores(const Params& p) {
  const i32 at = static_cast<i32>(ptx::block_index() * 128 + ptx::thread_index());
  const i32 i = at / p.rows, j = at % p.rows;
  float sum = 0;
  for (i32 d = 0; d < DIM; ++d) sum = ptx::fma(p.q[i * DIM + d], p.k[j * DIM + d], sum);
  p.s[at] = p.scale * sum;
}
// --8<-- [end:scores]

// The largest, or the sum, of the 32 numbers of a warp: every lane gets it.
float warp_max(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x = ptx::max(x, ptx::shuffle_xor(x, mask));
  return x;
}
float warp_sum(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
  return x;
}

// --8<-- [start:softmax]
// P = exp(S - rowmax S), in the place of S, and the sums of its rows: a warp has a row.
void softmax(const Params& p) {
  const i32 i = static_cast<i32>(ptx::block_index() * 4 + ptx::thread_index() / 32);
  const i32 lane = static_cast<i32>(ptx::thread_index() % 32);
  float* const row = p.s + i * p.rows;
  float m = -kInfinity<float>;
  for (i32 j = lane; j < p.rows; j += 32) m = ptx::max(m, row[j]);
  m = warp_max(m);
  float l = 0;
  for (i32 j = lane; j < p.rows; j += 32) {
    const float x = ptx::exp2(row[j] - m);
    row[j] = x;
    l += x;
  }
  l = warp_sum(l);
  if (lane == 0) p.sums[i] = l;
}
// --8<-- [end:softmax]

// --8<-- [start:output]
// O = P V / l: a block has a row, a thread one number of it.
void output(const Params& p) {
  const i32 i = static_cast<i32>(ptx::block_index());
  const i32 d = static_cast<i32>(ptx::thread_index());
  float sum = 0;
  for (i32 j = 0; j < p.rows; ++j) sum = ptx::fma(p.s[i * p.rows + j], p.v[j * DIM + d], sum);
  p.o[i * DIM + d] = sum / p.sums[i];
}
// --8<-- [end:output]

extern "C" __global__ void fulmen_kernel(const Params p) {
  if (p.step == 0) scores(p);
  if (p.step == 1) softmax(p);
  if (p.step == 2) output(p);
}
