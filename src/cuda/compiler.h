// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a kernel's text to machine code, and the gate: what the assembler's log says about a kernel
// decides whether its config may be used at all (docs/decisions: the compiler's log is a gate).
// Thread safe; needs NVRTC but neither driver nor GPU.
#pragma once

#include <string>
#include <vector>

#include "cuda/nvrtc.h"
#include "cuda/source.h"
#include "plan/plan.h"

namespace fulmen::cuda {

// 90 from "sm_90a". Throws Error kArgument when the text is no architecture.
int arch_number(const std::string& arch);

// What the assembler reported of the entry.
struct ResourceUse {
  int registers = 0;
  std::size_t stack_bytes = 0;
  std::size_t spill_store_bytes = 0;
  std::size_t spill_load_bytes = 0;
  std::vector<std::string> findings;  // "C7510: Potential Performance Loss: ...", each once
  InstructionCounts instructions;     // of the machine code
};

ResourceUse parse_log(const std::string& log);

// Why the config may not be used, one sentence; "" when it may.
std::string gate(const KernelSpec& spec, const ResourceUse& use);

// How this process got a kernel's machine code.
enum class Origin { kCompiled, kDisk, kBundle };
const char* name(Origin origin);

struct CompiledKernel {
  std::string cubin;
  std::string log;
  Origin origin = Origin::kCompiled;
};

// Of its log and of its machine code.
ResourceUse resource_use(const CompiledKernel& kernel);

// The options of every compilation, architecture included.
std::vector<std::string> compile_options(const std::string& arch);

// Throws Error kCompile, whose sentence ends with the log; kUnsupported when this NVRTC does not
// know the architecture.
CompiledKernel compile(const Nvrtc& nvrtc, const KernelSpec& spec, const std::string& arch,
                       const std::vector<SourceFile>& files = kernel_sources());

}  // namespace fulmen::cuda
