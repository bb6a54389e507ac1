// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The matrix product of one warp, on every GPU since Ampere: D (16 x 8, float32) += A (16 x 16)
// B (16 x 8), 16-bit inputs. Of lane l, g = l / 4, q = l % 4:
//   d   0, 1: row g, columns 2q, 2q + 1     2, 3: row g + 8, the same columns
//   a   0: row g, columns 2q, 2q + 1   1: row g + 8   2: row g, columns + 8   3: row g + 8, + 8
//   b   0: rows 2q, 2q + 1, column g   1: rows + 8
// so that a pair of neighbouring d, packed, is an a of the next product. PTX ISA 9.0, 9.7.14.5.
#pragma once

#include "kernels/base.cuh"
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

// mma.sync.aligned.m16n8k16.row.col
template <DType kDType>
inline void mma_m16n8k16(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kDType == DType::kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// mma.sync.aligned.m16n8k8.row.col, float32 words of which the tensor core reads the upper 19 bits:
//   a   0: row g, column q   1: row g + 8   2: row g, column + 4   3: row g + 8, + 4
//   b   0: row q, column g   1: row + 4
inline void mma_m16n8k8_tf32(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// To the nearest number of 11 significant bits; of two as near as each other the even one on Hopper
// and later, where that is one instruction, before it the larger one, which takes four.
inline u32 round_to_tf32(u32 x) {
  u32 y;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "r"(x));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "r"(x));
#endif
  return y;
}

// The same where a NaN may become any number: two instructions before Hopper.
inline u32 round_number_to_tf32(u32 x) {
#if __CUDA_ARCH__ >= 900
  return round_to_tf32(x);
#else
  return (x + 0x1000u) & 0xffffe000u;
#endif
}

}  // namespace fulmen::ptx
