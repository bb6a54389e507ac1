// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Operands of mma from shared memory: ldmatrix.x4, plain in memory.cuh, transposed here.
// PTX ISA 9.0, section 9.7.14.5.15.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

// ldmatrix.x4.trans: lane l gives the address of row l % 8 of matrix l / 8; word i of lane l is
// column l / 4, rows 2 (l % 4) and + 1, of matrix i.
inline U32x4 ldmatrix_x4_trans(u32 row_address) {
  U32x4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(row_address)
               : "memory");
  return x;
}

}  // namespace fulmen::ptx
