// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Bits that stay set, on the host: what src/kernels/ptx/fault.cuh declares.
#pragma once

#include "emulator/accesses.h"

namespace fulmen::ptx {

inline void set_bits(u32* word, u32 bits, Site site = Where::current()) {
  emulator::on_global(word, 4, emulator::Kind::kAtomic, site);
  emulator::store_unseen(word, emulator::load_unseen(word) | bits);
}

}  // namespace fulmen::ptx
