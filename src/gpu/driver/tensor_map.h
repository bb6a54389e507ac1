// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays as Hopper's copy engine reads them: a description of 128 bytes that the driver makes from
// pointer, extents and strides. Making one takes most of a microsecond, so each thread keeps the
// last ones: a description is a function of its box alone and never goes stale.
#pragma once

#include "core/tensor.h"
#include "gpu/driver/driver.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {

// An array of 16-bit numbers, copied in boxes of (box_dims, box_rows).
struct TensorBox {
  void* data;
  u64 extents[4];        // dims, rows, heads, batch
  u64 strides_bytes[3];  // of rows, heads, batch
  u32 box_rows;
  u32 box_dims = 64;
  bool swizzle = true;  // of 128 bytes
  DType dtype = DType::kBFloat16;

  bool operator==(const TensorBox&) const = default;
};

// tensor: with its four axes.
TensorBox tensor_box(const Tensor& tensor, i32 box_rows);

void encode(const Driver& driver, const TensorBox& box, TensorMap& map);

}  // namespace fulmen::gpu
