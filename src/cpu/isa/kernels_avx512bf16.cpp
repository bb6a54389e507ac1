// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels for AVX-512 with BF16: those of AVX-512, and products of bf16 by vdpbf16ps.
// cmake/isa.cmake gives this file its own flags; backend.cpp picks its tables at run time.

#include "cpu/isa/pairs.h"
#include "cpu/isa/table.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {

const IsaTables kTablesAvx512Bf16 = {table<float>("avx512bf16"), table<double>("avx512bf16"),
                                     &kPairKernels};

}  // namespace fulmen::cpu
