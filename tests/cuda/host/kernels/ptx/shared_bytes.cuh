// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The host's version of src/kernels/ptx/shared_bytes.cuh.
#pragma once

#include "host_grid.h"
#include "kernels/base.cuh"

namespace fulmen::ptx {

inline u8* shared_bytes() { return host::shared_memory(); }

}  // namespace fulmen::ptx
