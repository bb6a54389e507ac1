// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Decoding: one new query a request, against keys in pages. A warp has the GROUP query heads that
// share a head of keys, and a split of the keys; what it finds are parts, which a second launch
// merges.
#include "kernels/ptx/memory.cuh"
#include "warp.cuh"

constexpr i32 kKeyFloats = DIM + 1;  // of a row of K in shared memory: columns in different banks

struct Params {
  const float* q;      // (request, head, dim)
  const float* k;      // (page, PAGE, kv_head, dim)
  const float* v;      // (page, PAGE, kv_head, dim)
  const i32* table;    // (request, max_pages)
  const i32* lengths;  // (request)
  float* o_parts;      // (request, head, split, dim)
  float* lse_parts;    // (request, head, split)    in base 2; -inf: no keys
  float* o;            // (request, head, dim)
  i32 kv_heads;
  i32 max_pages;
  i32 splits;
  i32 step;     // 0: the parts, 1: the merge
  float scale;  // 1 / sqrt(dim) * log2(e)
};

// --8<-- [start:load]
// Up to 32 rows of K and V, from `first` on, wherever their pages are; zeros behind `end`.
void load_rows(const Params& p, float* K, float* V, i32 request, i32 kv_head, i32 first, i32 end) {
  const i32 lane = static_cast<i32>(ptx::thread_index()), key = first + lane;
  i32 row = -1;  // of this lane's key, in the pool
  if (key < end) row = p.table[request * p.max_pages + key / PAGE] * PAGE + key % PAGE;
  for (i32 r = 0; r < 32; ++r) {
    const i32 from = ptx::shuffle(row, static_cast<u32>(r));
    for (i32 d = lane; d < DIM; d += 32) {
      const i32 at = (from * p.kv_heads + kv_head) * DIM + d;
      K[r * kKeyFloats + d] = from < 0 ? 0 : p.k[at];
      V[r * DIM + d] = from < 0 ? 0 : p.v[at];
    }
  }
}
// --8<-- [end:load]

// --8<-- [start:part]
void attend(const Params& p) {
  float* const Q = reinterpret_cast<float*>(ptx::shared_bytes());  // (GROUP, DIM)
  float* const K = Q + GROUP * DIM;                                // (32, kKeyFloats)
  float* const V = K + 32 * kKeyFloats;                            // (32, DIM)
  const i32 lane = static_cast<i32>(ptx::thread_index());
  const i32 block = static_cast<i32>(ptx::block_index());
  const i32 split = block % p.splits, kv_head = block / p.splits % p.kv_heads;
  const i32 request = block / p.splits / p.kv_heads;
  const i32 first_head = (request * p.kv_heads + kv_head) * GROUP;
  for (i32 at = lane; at < GROUP * DIM; at += 32) Q[at] = p.q[first_head * DIM + at];
  const i32 tiles = static_cast<i32>(ceil_div(p.lengths[request], 32 * p.splits));
  const i32 begin = split * tiles * 32, end = min(p.lengths[request], begin + tiles * 32);
  float m[GROUP], l[GROUP] = {}, O[GROUP][DIM / 32] = {};
  for (i32 g = 0; g < GROUP; ++g) m[g] = -kInfinity<float>;
  for (i32 first = begin; first < end; first += 32) {
    load_rows(p, K, V, request, kv_head, first, end);
    ptx::warp_sync();
    for (i32 g = 0; g < GROUP; ++g) {  // read once, used GROUP times
      float s = 0;
      for (i32 d = 0; d < DIM; ++d) s = ptx::fma(Q[g * DIM + d], K[lane * kKeyFloats + d], s);
      s = first + lane < end ? s * p.scale : -kInfinity<float>;
      const float m_new = ptx::max(m[g], warp_max(s));
      const float shrink = ptx::exp2(m[g] - m_new), weight = ptx::exp2(s - m_new);
      l[g] = l[g] * shrink + warp_sum(weight);
      m[g] = m_new;
      for (i32 c = 0; c < DIM / 32; ++c) O[g][c] *= shrink;
      for (i32 j = 0; j < 32; ++j) {
        const float w = of_lane(weight, static_cast<u32>(j));
        for (i32 c = 0; c < DIM / 32; ++c) {
          O[g][c] = ptx::fma(w, V[j * DIM + lane + 32 * c], O[g][c]);
        }
      }
    }
    ptx::warp_sync();
  }
  for (i32 g = 0; g < GROUP; ++g) {
    const i32 at = (first_head + g) * p.splits + split;
    for (i32 c = 0; c < DIM / 32; ++c) {
      p.o_parts[at * DIM + lane + 32 * c] = l[g] > 0 ? O[g][c] / l[g] : 0;
    }
    if (lane == 0) p.lse_parts[at] = l[g] > 0 ? m[g] + ptx::log2(l[g]) : -kInfinity<float>;
  }
}
// --8<-- [end:part]

// --8<-- [start:merge]
// A warp has a head of a request: o = sum of 2^(lse_s - lse) o_s, with lse of all.
void merge(const Params& p) {
  const i32 head = static_cast<i32>(ptx::block_index()),
            lane = static_cast<i32>(ptx::thread_index());
  const float* const lse = p.lse_parts + head * p.splits;
  float m = -kInfinity<float>, l = 0, O[DIM / 32] = {};
  for (i32 s = 0; s < p.splits; ++s) m = ptx::max(m, lse[s]);
  for (i32 s = 0; s < p.splits; ++s) {
    const float weight = m > -kInfinity<float> ? ptx::exp2(lse[s] - m) : 0;
    l += weight;
    for (i32 c = 0; c < DIM / 32; ++c) {
      const float part = p.o_parts[(head * p.splits + s) * DIM + lane + 32 * c];
      O[c] = ptx::fma(weight, part, O[c]);
    }
  }
  for (i32 c = 0; c < DIM / 32; ++c) p.o[head * DIM + lane + 32 * c] = l > 0 ? O[c] / l : 0;
}
// --8<-- [end:merge]

extern "C" __global__ void fulmen_kernel(const Params p) { p.step == 0 ? attend(p) : merge(p); }
