// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The gate: what the assembler's log says about a kernel decides whether its config may be used at
// all. Where matrix instructions wait for each other, or registers are spilled, results are right
// and only time would show it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "gpu/jit/instructions.h"
#include "gpu/jit/kernel_spec.h"

namespace fulmen::gpu {

// What the assembler reported of the entry.
struct ResourceUse {
  int registers = 0;
  std::size_t stack_bytes = 0;
  std::size_t spill_store_bytes = 0;
  std::size_t spill_load_bytes = 0;
  std::vector<std::string> findings;  // "C7510: Potential Performance Loss: ...", each once
  InstructionCounts instructions;     // of the machine code
};

// Without the instructions.
ResourceUse parse_log(const std::string& log);

ResourceUse resource_use(const std::string& log, std::string_view cubin);

// Why the config may not be used, one sentence; "" when it may.
std::string gate(const KernelSpec& spec, const ResourceUse& use);

}  // namespace fulmen::gpu
