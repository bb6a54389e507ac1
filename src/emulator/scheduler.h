// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs one world to its end on the thread of the host that calls.
#pragma once

#include <functional>

#include "emulator/block.h"

namespace fulmen::emulator {

// Whether a thread of a block runs on this thread of the host whose loads and stores through
// pointers anybody wants to know of.
extern constinit thread_local bool watching __attribute__((tls_model("initial-exec")));

void run_world(World& world, const std::function<void()>& kernel);

}  // namespace fulmen::emulator
