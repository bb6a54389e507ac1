// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a kernel's text to machine code. Thread safe; needs NVRTC but neither driver nor GPU.
#pragma once

#include <string>
#include <vector>

#include "gpu/jit/nvrtc.h"
#include "gpu/jit/source.h"

namespace fulmen::gpu {

// 90 from "sm_90a". Throws Error kArgument when the text is no architecture.
int arch_number(const std::string& arch);

// How this process got a kernel's machine code.
enum class Origin { kCompiled, kDisk, kBundle };
const char* name(Origin origin);

struct CompiledKernel {
  std::string cubin;
  std::string log;
  Origin origin = Origin::kCompiled;
};

// The options of every compilation, architecture included.
std::vector<std::string> compile_options(const std::string& arch);

// Throws Error kCompile, whose sentence ends with the log; kUnsupported when this NVRTC does not
// know the architecture.
CompiledKernel compile(const Nvrtc& nvrtc, const KernelSpec& spec, const std::string& arch,
                       const std::vector<SourceFile>& files = kernel_sources());

}  // namespace fulmen::gpu
