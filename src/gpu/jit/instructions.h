// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a kernel's machine code consists of, read from the cubin itself: no disassembler is needed.
#pragma once

#include <string_view>

namespace fulmen::gpu {

// Instructions in the machine code of a kernel by what they do; each counts once, however often it
// runs.
struct InstructionCounts {
  int tensor = 0;           // products of tiles on tensor cores
  int arithmetic = 0;       // additions, products, maxima of floating-point numbers
  int special = 0;          // exp2, reciprocals
  int conversion = 0;       // between number formats
  int shared = 0;           // shared memory
  int global = 0;           // global memory, copy engine included
  int local = 0;            // spilled registers
  int synchronisation = 0;  // barriers and waits
  int other = 0;            // addresses, loops, moves
};

// Counts by class for architectures sm_75 and later, whose instructions are 16 bytes with the
// operation in the low 9 bits. Zero for anything that is not a cubin.
InstructionCounts count_instructions(std::string_view cubin);

}  // namespace fulmen::gpu
