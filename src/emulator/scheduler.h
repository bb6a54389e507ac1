// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs one world to its end on the thread of the host that calls.
#pragma once

#include <functional>

#include "emulator/block.h"

namespace fulmen::emulator {

void run_world(World& world, const std::function<void()>& kernel);

}  // namespace fulmen::emulator
