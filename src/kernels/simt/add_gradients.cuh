// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of a backward pass whose gradients are those of a part: dq += that of the call, dk and dv
// likewise. Nothing but memory: 8 elements of a row a thread, whole vectors where they lie so.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/simt/config.h"

namespace fulmen {

// sums[0 .. 8) += part[0 .. 8), of 16 bits; both at multiples of 16 bytes.
template <DType kDType>
inline void add_vectors(float* sums, const u16* part) {
  const ptx::U32x4 words = ptx::load_global_x4(part);
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    ptx::F32x4 x = ptx::load_l2_x4(sums + 4 * half);
#pragma unroll
    for (i32 pair = 0; pair < 2; ++pair) {
      const ptx::F32x2 added = ptx::unpack<kDType>(words.word[2 * half + pair]);
      x.word[2 * pair] += added.word[0];
      x.word[2 * pair + 1] += added.word[1];
    }
    ptx::store_l2_x4(sums + 4 * half, x);
  }
}

template <FmaConfig kConfig>
void add_vector(const AddedGradient& gradient, u32 vector) {
  using Real = typename ElementOf<kConfig.dtype>::Real;
  const u32 row_of_all = vector / gradient.vectors_of_row;
  const i64 first = (vector - row_of_all * gradient.vectors_of_row) * kAddedElements;
  const u32 head_of_all = row_of_all / gradient.rows;
  const i64 row = row_of_all - head_of_all * gradient.rows;
  const i64 batch = head_of_all / gradient.heads;
  const i64 head = head_of_all - batch * gradient.heads;
  const i64 sum = gradient.sums.offset(batch, head, row, first);
  const i64 part = gradient.part.offset(batch, head, row, first);
  if constexpr (sizeof(typename ElementOf<kConfig.dtype>::Type) == 2) {
    float* const sums = reinterpret_cast<float*>(gradient.sums.data) + sum;
    const bool is_whole = first + kAddedElements <= gradient.dim;
    if (is_whole && gradient.sums.strides[3] == 1 && reinterpret_cast<u64>(sums) % 16 == 0) {
      return add_vectors<kConfig.dtype>(sums,
                                        reinterpret_cast<const u16*>(gradient.part.data) + part);
    }
  }
  for (i64 d = 0; d < min<i64>(gradient.dim - first, kAddedElements); ++d) {
    const i64 at = sum + d * gradient.sums.strides[3];
    store_real(gradient.sums, at,
               load_real<Real>(gradient.sums, at) + load_real<Real>(gradient.part, part + d));
  }
}

template <FmaConfig kConfig>
void add_gradients(const AddedGradients& p) {
  i64 vector = static_cast<i64>(ptx::block_index()) * kConfig.num_threads + ptx::thread_index();
  for (u32 n = 0; n < p.count; ++n) {
    const AddedGradient& gradient = p.gradients[n];
    if (vector < gradient.num_vectors)
      return add_vector<kConfig>(gradient, static_cast<u32>(vector));
    vector -= gradient.num_vectors;
  }
}

}  // namespace fulmen
