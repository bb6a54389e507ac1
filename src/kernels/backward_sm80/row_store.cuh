// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of a warp's accumulators, scaled and rounded, to an array of any dtype, stride and
// alignment: 16 bytes a lane, 8 of float32, where vectors of the array lie at multiples of 16
// bytes, else number by number. Called by backward_sm80 and backward_postprocess_sm80.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/common/warp_mma_sm80.cuh"

namespace fulmen {

struct RowStore {
  const ArrayView& array;
  i64 offset;  // of the lane's first row and the first dim, in elements
  i32 dims;    // that the array has from there on
  bool is_aligned;

  RowStore(const ArrayView& array_, DType dtype, i64 offset_, i64 dims_)
      : array(array_), offset(offset_), dims(static_cast<i32>(dims_)) {
    const i64 vector = 16 / size_bytes(dtype);  // elements
    const u64 address = reinterpret_cast<u64>(array.data + offset * size_bytes(dtype));
    is_aligned = array.dtype == dtype && array.strides[3] == 1 && array.strides[2] % vector == 0 &&
                 dims % vector == 0 && address % 16 == 0;
  }

  // Row h of the lane's two (ptx/mma.cuh), which is `row` below its first, if it is inside the
  // array; zeros unless it counts. All lanes of a warp take part.
  template <DType kDType, i32 kFloats>
  void run(const float (&sums)[kFloats], i32 h, i32 row, bool inside, bool counts,
           float factor) const {
    float scaled[kFloats];
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) scaled[i] = counts ? sums[i] * factor : 0.f;
    const i64 at = offset + row * array.strides[2];
    if (is_aligned) {
      if constexpr (kDType == DType::kFloat32) {
        store_output_row(scaled, h, reinterpret_cast<float*>(array.data) + at, inside, dims);
      } else {
        store_output_row<kDType>(scaled, h, reinterpret_cast<u16*>(array.data) + at, inside, dims);
      }
    } else if (inside) {
      store_numbers(scaled, h, at);
    }
  }

 private:
  // In a loop that is not unrolled and therefore reads them from memory.
  template <i32 kFloats>
  void store_numbers(const float (&tile)[kFloats], i32 h, i64 from) const {
    float numbers[kFloats / 2];
#pragma unroll
    for (i32 at = 0; at < kFloats / 2; ++at) numbers[at] = tile[at / 2 * 4 + 2 * h + at % 2];
#pragma unroll 1
    for (i32 at = 0; at < kFloats / 2; ++at) {
      const i64 d = 8 * (at / 2) + 2 * static_cast<i32>(lane_index() % 4) + at % 2;
      if (d < dims) store_real(array, from + d * array.strides[3], numbers[at]);
    }
  }
};

}  // namespace fulmen
