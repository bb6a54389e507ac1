// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels for AVX2, FMA and F16C.
// cmake/isa.cmake gives this file its own flags; backend.cpp picks its tables at run time.

#include "cpu/isa/table.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {

const IsaTables kTablesAvx2 = {table<float>("avx2"), table<double>("avx2"), kLoops};

}  // namespace fulmen::cpu
