// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/shared_bytes.cuh declares, on the host.
#pragma once

#include "emulator/block.h"

namespace fulmen::ptx {

inline u8* shared_bytes() { return emulator::block().shared; }

}  // namespace fulmen::ptx
