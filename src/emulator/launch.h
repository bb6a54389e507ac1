// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs a kernel on the host: its blocks one after the other, the threads of a block as fibers whose
// turns a seeded scheduler draws. The same seed gives the same run. Called by tests.
#pragma once

#include <functional>

#include "kernels/base.cuh"

namespace fulmen::emulator {

struct Grid {
  i32 blocks;
  i32 threads;  // of a block: a multiple of 32, at most 1,024
  i32 shared_bytes;
  u32 seed;
};

// `kernel` is called once for every thread; it is the body of the entry, its arguments captured.
// Throws Error when an instruction is misused, or when all threads wait and nothing can wake them:
// the message then says what each warp waits for, and who has come.
void launch(const Grid& grid, const std::function<void()>& kernel);

}  // namespace fulmen::emulator
