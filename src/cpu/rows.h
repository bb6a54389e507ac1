// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of callers' arrays as the tiled kernels want them: taken where they lie when that is the
// working type with unit stride, else loaded into scratch; and which rows a task works on.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {

template <class Real>
inline constexpr DType kDTypeOf = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;

inline Source source_of(const Tensor& tensor, i64 batch, i64 head, i64 row) {
  return {tensor.address(batch, head, row, 0), tensor.dtype, tensor.strides[2], tensor.strides[3]};
}

inline Destination destination_of(const Tensor& tensor, i64 batch, i64 head, i64 row) {
  return {tensor.address(batch, head, row, 0), tensor.dtype, tensor.strides[2], tensor.strides[3]};
}

// How rows will be read: element by element, or in whole panels of lanes, which must then exist.
enum class Reads { kElements, kPanels };

template <class Real>
View<Real> rows_of(const Kernels<Real>& kernels, const Source& source, i64 rows, i64 dims,
                   Reads reads, Real* scratch, i64 scratch_stride) {
  const bool is_working_type = source.dtype == kDTypeOf<Real> &&
                               (source.dim_stride == 1 || dims <= 1) &&
                               reinterpret_cast<std::uintptr_t>(source.data) % sizeof(Real) == 0;
  if (is_working_type && (reads == Reads::kElements || dims % kernels.lanes == 0)) {
    return {static_cast<const Real*>(source.data), source.row_stride};
  }
  kernels.load_rows(source, rows, dims, scratch, scratch_stride);
  return {scratch, scratch_stride};
}

// rows [0, rows) of the destination = 0
template <class Real>
void clear_rows(const Kernels<Real>& kernels, const Destination& destination, i64 rows, i64 dims) {
  constexpr i64 kAtOnce = 64;
  alignas(64) const Real zeros[kAtOnce] = {};
  const Real one = 1;
  for (i64 d = 0; d < dims; d += kAtOnce) {
    Destination part = destination;
    part.data = static_cast<char*>(part.data) + d * part.dim_stride * size_bytes(part.dtype);
    kernels.store_rows({zeros, 0}, rows, min(kAtOnce, dims - d), &one, 0, part);
  }
}

}  // namespace fulmen::cpu
