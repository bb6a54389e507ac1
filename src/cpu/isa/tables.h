// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel tables of all instruction sets, each defined by its own translation unit.
#pragma once

#include "cpu/kernels.h"

namespace fulmen::cpu {

struct IsaTables {
  Kernels<float> float32;  // also for float16 and bfloat16
  Kernels<double> float64;
};

extern const IsaTables kTablesBaseline;
#if defined(__x86_64__)
extern const IsaTables kTablesAvx2;
extern const IsaTables kTablesAvx512;
#endif

}  // namespace fulmen::cpu
