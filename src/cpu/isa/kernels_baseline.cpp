// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels for the baseline of the target: SSE2 on x86-64, NEON on AArch64.
// cmake/isa.cmake gives this file its own flags; backend.cpp picks its tables at run time.

#include "cpu/isa/table.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {

#if defined(__x86_64__)
constexpr const char* kIsa = "sse2";
#elif defined(__aarch64__)
constexpr const char* kIsa = "neon";
#else
constexpr const char* kIsa = "generic";
#endif

const IsaTables kTablesBaseline = {table<float>(kIsa), table<double>(kIsa), kLoops};

}  // namespace fulmen::cpu
