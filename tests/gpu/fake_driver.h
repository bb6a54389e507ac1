// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What tests may ask of the fake driver beside CUDA's own functions.
#pragma once

#include "gpu/driver/driver.h"

struct FakeLaunch {
  fulmen::gpu::CUlaunchConfig config;
  int device;
  int dynamic_shared_bytes;  // as opted in
  const char* kernel;        // its name, from the first line of its text
  const void* params;        // a copy, for good
  fulmen::gpu::CUlaunchAttribute attributes[2];
};

// fake_num_calls: how often a function was called so far, by its name.
using FakeNumCalls = int(const char* function);
// fake_num_launches, and fake_launch: the one of that number, from 0.
using FakeNumLaunches = int();
using FakeLaunchOf = FakeLaunch(int index);
// Tensor maps hold their address in the first word.
// fake_num_bytes_in_streams: what cuMemAllocFromPoolAsync gave and cuMemFreeAsync did not get back.
using FakeNumBytesInStreams = std::size_t();
// fake_set_managed: whether a pointer of cuMemAlloc counts as managed memory.
using FakeSetManaged = void(unsigned long long pointer, int managed);
