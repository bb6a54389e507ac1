// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The host's version of src/kernels/ptx/fault.cuh.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

// A plain or: threads of the host take turns.
inline void set_bits(u32* word, u32 bits) { *word |= bits; }

}  // namespace fulmen::ptx
