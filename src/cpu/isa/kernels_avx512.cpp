// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels for AVX-512 F, BW, DQ and VL.
// cmake/isa.cmake gives this file its own flags; backend.cpp picks its tables at run time.

#include "cpu/isa/table.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {

const IsaTables kTablesAvx512 = {table<float>("avx512"), table<double>("avx512"), kLoops};

}  // namespace fulmen::cpu
