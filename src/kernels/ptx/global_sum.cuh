// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Sums in global memory to which many blocks add, in whatever order they come: red.global.add, of
// which nothing comes back. PTX ISA 9.0, section 9.7.13.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

inline void add_to(float* sum, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}
inline void add_to(double* sum, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(sum), "d"(x) : "memory");
}

// Neighbours from a multiple of 16 bytes on, each by itself; floats in one instruction from Hopper
// on.
inline void add_vector_to(float* sums, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
  for (i32 i = 0; i < 4; ++i) add_to(sums + i, x[i]);
#endif
}
inline void add_vector_to(double* sums, const double (&x)[2]) {
  for (i32 i = 0; i < 2; ++i) add_to(sums + i, x[i]);
}

}  // namespace fulmen::ptx
