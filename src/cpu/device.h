// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What plans need to know of this processor, and what build_info tells of this build.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace fulmen::cpu {

// The instruction set and the number of threads that a run would use now. Throws Error when
// FULMEN_CPU_ISA names an instruction set that was not built or is not present.
CpuDevice cpu_device();

// Names of the instruction sets that were built, best last.
std::vector<const char*> built_isas();

}  // namespace fulmen::cpu
