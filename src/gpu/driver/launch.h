// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One launch on the caller's stream. Allocates nothing, waits for nothing and reads no device
// memory, so that CUDA graphs capture it. And tensor maps, which such a launch is given: arrays as
// Hopper's copy engine reads them.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "gpu/jit/module.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {

// The most blocks of one launch.
inline constexpr std::int64_t kMaxBlocks = 2147483647;

// params: an object of kernel.spec.params_bytes bytes, read before the call returns. stream: of the
// kernel's device, or null for its default stream. Throws Error; an error of the kernel itself
// shows up in a later call of the process, as always in CUDA.
void launch(const LoadedKernel& kernel, const LaunchShape& shape, const void* params,
            CUstream stream);

// An array of numbers of 16 or 8 bits, copied in boxes of (box_dims, box_rows).
struct TensorBox {
  void* data;
  u64 extents[4];        // dims, rows, heads, batch
  u64 strides_bytes[3];  // of rows, heads, batch
  u32 box_rows;
  u32 box_dims = 64;
  bool swizzle = true;  // of 128 bytes, where rows of a box have 64 of those
  DType dtype = DType::kBFloat16;

  bool operator==(const TensorBox&) const = default;
};

// tensor: with its four axes. Boxes have rows of 128 bytes.
TensorBox tensor_box(const Tensor& tensor, i32 box_rows);

// Making a map takes most of a microsecond, so each thread keeps the last ones: a map is a function
// of its box alone and never goes stale.
void encode(const Driver& driver, const TensorBox& box, TensorMap& map);

}  // namespace fulmen::gpu
