// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of every backward pass that makes gradients of what a user's score reads: sums of 64 bits
// in the workspace, to which other kernels have added, become arrays of any dtype and strides.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/expression.h"
#include "kernels/ptx/thread.cuh"
#include "kernels/simt/config.h"

namespace fulmen {

// What was summed of an array, rounded into its gradient: an element a thread.
template <FmaConfig kConfig>
void store_captures(const CaptureGradients& p) {
  i64 element = static_cast<i64>(ptx::block_index()) * kConfig.num_threads + ptx::thread_index();
  for (i32 array = 0; array < kMaxCaptures; ++array) {
    const ArrayView& gradient = p.gradients[array];
    if (!gradient.present()) continue;
    const i64* extents = p.extents[array];
    const i64 count = extents[0] * extents[1] * extents[2] * extents[3];
    if (element >= count) {
      element -= count;
      continue;
    }
    i64 offset = 0, rest = element;
    for (i32 axis = 4; axis-- > 0; rest /= extents[axis]) {
      offset += rest % extents[axis] * gradient.strides[axis];
    }
    store_real(gradient, offset, p.sums[array][element]);
    return;
  }
}

}  // namespace fulmen
