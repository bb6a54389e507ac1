// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a kernel's machine code consists of, read from the cubin itself: no disassembler is needed.
#pragma once

#include <string_view>

#include "plan/plan.h"

namespace fulmen::gpu {

// Counts by class for architectures sm_75 and later, whose instructions are 16 bytes with the
// operation in the low 9 bits. Zero for anything that is not a cubin.
InstructionCounts count_instructions(std::string_view cubin);

}  // namespace fulmen::gpu
