// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One launch on the caller's stream. Allocates nothing, waits for nothing and reads no device
// memory, so that CUDA graphs capture it.
#pragma once

#include <cstdint>

#include "gpu/jit/module.h"

namespace fulmen::gpu {

// The most blocks of one launch.
inline constexpr std::int64_t kMaxBlocks = 2147483647;

// params: an object of kernel.spec.params_bytes bytes, read before the call returns. stream: of the
// kernel's device, or null for its default stream. Throws Error; an error of the kernel itself
// shows up in a later call of the process, as always in CUDA.
void launch(const LoadedKernel& kernel, const LaunchShape& shape, const void* params,
            CUstream stream);

}  // namespace fulmen::gpu
