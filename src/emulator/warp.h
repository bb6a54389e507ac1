// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the lanes of a warp do together: hand values round. Shuffles, votes and warp-wide loads and
// stores of matrices are made of it. And registers that warpgroups hand over.
#pragma once

#include <array>

#include "emulator/block.h"

namespace fulmen::emulator {

// All 32 lanes come with a value and leave with everybody's. Lanes that meet in different
// instructions are an Error. Memory is ordered only where `ordered` says so (bar.warp.sync).
const std::array<u64, kWarpSize>& exchange(const char* instruction, u64 value,
                                           bool ordered = false);

// The four 8x8 matrices of 16-bit numbers of ldmatrix.x4 and stmatrix.x4 (.trans), as
// kernels/ptx/memory.cuh describes them.
std::array<u32, 4> load_matrices(u32 row_address, Site site);
std::array<u32, 4> load_transposed_matrices(u32 row_address, Site site);
void store_matrices(u32 row_address, const std::array<u32, 4>& words, Site site);
void store_transposed_matrices(u32 row_address, const std::array<u32, 4>& words, Site site);

// d += A B of mma.sync, this lane's part: m16n8k16 of 16-bit numbers, m16n8k8 of TF32 (kFloat32, of
// which the upper 19 bits count). Fragments: src/kernels/ptx/mma.cuh.
void multiply_fragments(const std::array<WarpOperands, kWarpSize>& operands, DType dtype, float* d);

// setmaxnreg.inc, .dec. Kernels that have it are compiled for one block on a multiprocessor: at
// launch a thread holds its share of all registers, or what the largest setmaxnreg.inc names, if
// that is less. Whether there are registers enough is not looked at.
void increase_registers(u32 count);
void decrease_registers(u32 count);

}  // namespace fulmen::emulator
