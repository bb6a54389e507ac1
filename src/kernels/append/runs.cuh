// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Elements of a row that a thread moves at once, and how two of them turn.
#pragma once

#include "kernels/append/config.h"
#include "kernels/common/array_access.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

// N elements that lie side by side, or one. As bits: what does not rotate is never converted.
template <class T, i32 kCount>
struct Run {
  static constexpr i32 kVectors = kCount * static_cast<i32>(sizeof(T)) / 16;
  static constexpr bool kIsWhole = kVectors * 16 == kCount * static_cast<i32>(sizeof(T));
  T element[kCount];
};

template <class T, i32 kCount>
void load_run(Run<T, kCount>& run, const u8* address) {
  if constexpr (Run<T, kCount>::kIsWhole && kCount > 1) {
    struct Vectors {
      ptx::U32x4 vector[Run<T, kCount>::kVectors];
    } all;
    for (i32 i = 0; i < Run<T, kCount>::kVectors; ++i) {
      all.vector[i] = ptx::load_global_x4(reinterpret_cast<const u16*>(address) + 8 * i);
    }
    run = __builtin_bit_cast(Run<T, kCount>, all);
  } else {
    for (i32 i = 0; i < kCount; ++i) run.element[i] = load_element<T>(address + i * sizeof(T));
  }
}

template <class T, i32 kCount>
void store_run(const Run<T, kCount>& run, u8* address) {
  if constexpr (Run<T, kCount>::kIsWhole && kCount > 1) {
    struct Vectors {
      ptx::U32x4 vector[Run<T, kCount>::kVectors];
    };
    const Vectors all = __builtin_bit_cast(Vectors, run);
    for (i32 i = 0; i < Run<T, kCount>::kVectors; ++i) {
      ptx::store_global_x4(reinterpret_cast<u16*>(address) + 8 * i, all.vector[i]);
    }
  } else {
    for (i32 i = 0; i < kCount; ++i) store_element(address + i * sizeof(T), run.element[i]);
  }
}

// Elements of a byte.
template <class T, i32 kCount>
void store_few(const Run<T, kCount>& run, u8* address) {
  static_assert(sizeof(T) == 1);
  if constexpr (kCount == 8) {
    store_element(address, __builtin_bit_cast(u64, run));
  } else if constexpr (kCount == 4) {
    store_element(address, __builtin_bit_cast(u32, run));
  } else {
    for (i32 i = 0; i < kCount; ++i) store_element(address + i, run.element[i]);
  }
}

// (x0, x1) = (x0 cos - x1 sin, x1 cos + x0 sin), no product contracted: as the CPU computes it.
template <class Real>
void rotate_pair(Real& x0, Real& x1, Real cos, Real sin) {
  const Real a = x0;
  const Real b = x1;
  x0 = ptx::rounded_product(a, cos) - ptx::rounded_product(b, sin);
  x1 = ptx::rounded_product(b, cos) + ptx::rounded_product(a, sin);
}

}  // namespace fulmen
