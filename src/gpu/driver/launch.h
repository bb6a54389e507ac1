// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One launch on the caller's stream. Allocates nothing, waits for nothing and reads no device
// memory, so that CUDA graphs capture it.
#pragma once

#include <cstdint>

#include "gpu/jit/module.h"

namespace fulmen::gpu {

struct LaunchShape {
  std::int64_t num_blocks = 0;    // in x; 0: nothing is launched
  unsigned cluster_size = 1;      // blocks of a cluster, 1 .. 8
  bool overlap_previous = false;  // may start while the kernel before it in the stream drains
};

// The most blocks of one launch.
inline constexpr std::int64_t kMaxBlocks = 2147483647;

// params: an object of kernel.spec.params_bytes bytes, read before the call returns. stream: of the
// kernel's device, or null for its default stream. Throws Error; an error of the kernel itself
// shows up in a later call of the process, as always in CUDA.
void launch(const LoadedKernel& kernel, const LaunchShape& shape, const void* params,
            CUstream stream);

}  // namespace fulmen::gpu
