// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Sums in global memory, on the host: what src/kernels/ptx/global_sum.cuh declares.
#pragma once

#include "emulator/accesses.h"

namespace fulmen::ptx {

template <class Real>
void add_to(Real* sum, Real x, Site site = Where::current()) {
  if (reinterpret_cast<u64>(sum) % sizeof(Real) != 0) {
    emulator::fail("red.global.add to an address that is not a multiple of the number's size");
  }
  emulator::on_global(sum, sizeof(Real), emulator::Kind::kAtomic, site);
  emulator::store_unseen(sum, emulator::load_unseen(sum) + x);
}

template <class Real, i32 kCount>
void add_vector_to(Real* sums, const Real (&x)[kCount], Site site = Where::current()) {
  if (reinterpret_cast<u64>(sums) % 16 != 0) {
    emulator::fail("red.global.add of a vector to an address that is not a multiple of 16");
  }
  for (i32 i = 0; i < kCount; ++i) add_to(sums + i, x[i], site);
}

}  // namespace fulmen::ptx
