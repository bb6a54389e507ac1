// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What tests may ask of the fake driver beside CUDA's own functions.
#pragma once

#include "cuda/driver_types.h"

struct FakeLaunch {
  fulmen::cuda::CUlaunchConfig config;
  int device;
  int dynamic_shared_bytes;  // as opted in
  const void* params;
  fulmen::cuda::CUlaunchAttribute attributes[2];
};

// fake_num_calls: how often a function was called so far, by its name.
using FakeNumCalls = int(const char* function);
using FakeLastLaunch = FakeLaunch();
