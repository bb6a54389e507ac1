// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Read before the generated text of a kernel when it is compiled for the host: CUDA's words for an
// entry mean nothing there. With what the emulator takes of the standard library, so that compiling
// this ahead saves reading it for every kernel.
#pragma once

#include <array>
#include <bit>
#include <bitset>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__ __attribute__((visibility("hidden")))
#define __launch_bounds__(...)
#define __grid_constant__

namespace fulmen::emulator {

// Calls an entry whose parameters lie at an address, whatever their type is.
template <class Params>
inline void call(void (*entry)(Params), const void* params) {
  entry(*static_cast<const Params*>(params));
}

}  // namespace fulmen::emulator
