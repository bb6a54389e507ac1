// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A GPU kernel on the CPU, with a barrier missing: what the emulator's checker says, and where a
// debugger stops (missing_barrier.gdb). Built with the emulator, which is no part of the installed
// package: cmake --build --preset release --target debug_kernel
#include <cstdio>

#include "emulator/launch.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace {

using fulmen::u32;
namespace ptx = fulmen::ptx;

// --8<-- [start:kernel]
// Reverses 128 numbers in shared memory.
void reverse() {
  const u32 tile = ptx::dynamic_shared();
  const u32 thread = ptx::thread_index();
  ptx::store_shared(tile + 4 * thread, 0);
  ptx::block_sync();
  ptx::store_shared(tile + 4 * thread, thread);
  // here all threads should meet: ptx::block_sync();
  const u32 x = ptx::load_shared(tile + 4 * (127 - thread));
  ptx::block_sync();
  ptx::store_shared(tile + 4 * thread, x);
}
// --8<-- [end:kernel]

}  // namespace

int main() {
  try {
    fulmen::emulator::launch({.blocks = 1,
                              .threads = 128,
                              .shared_bytes = 512,
                              .seed = 1,
                              .kernel = "reverse",
                              .shared_arrays = {{"tile", 0, 512, 4}}},
                             reverse);
    std::puts("nothing found");
  } catch (const fulmen::emulator::Error& error) {
    std::puts(error.what());
  }
  return 0;
}
