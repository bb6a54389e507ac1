// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Loads and stores. Shared memory is a space of its own with 32-bit addresses; the kernels hand
// out its bytes themselves (ForwardLayout). PTX ISA 9.0, sections 9.7.9, 9.7.13, 9.7.15.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

struct U32x4 {
  u32 word[4];
};
struct U32x2 {
  u32 word[2];
};
struct F32x2 {
  float word[2];
};

// The first byte of the block's dynamic shared memory, on a multiple of 1,024.
inline u32 dynamic_shared() {
  extern __shared__ __align__(1024) u8 fulmen_shared[];
  return static_cast<u32>(__cvta_generic_to_shared(fulmen_shared));
}

// ld.shared / st.shared
inline u32 load_shared(u32 address) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
inline void store_shared(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
// red.shared.or: sets bits beside those that other threads set.
inline void or_shared(u32 address, u32 bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}
inline void store_shared_x2(u32 address, U32x2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x.word[0]), "r"(x.word[1])
               : "memory");
}
// ld.shared.v2.b32; not ordered with stores, only with waits.
inline U32x2 load_shared_x2(u32 address) {
  U32x2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(x.word[0]), "=r"(x.word[1])
               : "r"(address));
  return x;
}
// ld.shared.v2.f32; not ordered with stores, only with waits.
inline F32x2 load_shared_f32x2(u32 address) {
  F32x2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.word[0]), "=f"(x.word[1])
               : "r"(address));
  return x;
}
inline U32x4 load_shared_x4(u32 address) {
  U32x4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(address)
               : "memory");
  return x;
}
inline void store_shared_x4(u32 address, U32x4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.word[0]),
               "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
               : "memory");
}

// stmatrix.x4: four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of
// matrix l / 8, word i of lane l is row l / 4, columns 2 (l % 4) and + 1, of matrix i.
inline void stmatrix_x4(u32 row_address, U32x4 x) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
      : "memory");
}

// stmatrix.x4.trans: as stmatrix_x4, each matrix transposed on its way.
inline void stmatrix_x4_trans(u32 row_address, U32x4 x) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
      : "memory");
}

// ldmatrix.x4: the reverse of stmatrix_x4.
inline U32x4 ldmatrix_x4(u32 row_address) {
  U32x4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(row_address)
               : "memory");
  return x;
}

// ld.global.v4: 16 bytes, aligned.
inline U32x4 load_global_x4(const u16* pointer) {
  U32x4 x;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "l"(pointer));
  return x;
}

// ld.global.nc: an element of an array that no kernel of the call writes.
inline float load_constant(const float* pointer) { return __ldg(pointer); }
inline double load_constant(const double* pointer) { return __ldg(pointer); }
inline u16 load_constant(const u16* pointer) { return __ldg(pointer); }
inline u8 load_constant(const u8* pointer) { return __ldg(pointer); }
inline i32 load_constant(const i32* pointer) { return __ldg(pointer); }
inline i64 load_constant(const i64* pointer) { return __ldg(pointer); }

// st.global.v4: 16 bytes, aligned.
inline void store_global_x4(u16* pointer, U32x4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(x.word[0]),
               "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
               : "memory");
}

// atom.inc: returns the old value x and stores x >= last ? 0 : x + 1.
inline u32 atomic_inc(u32* pointer, u32 last) {
  u32 old;
  asm volatile("atom.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(pointer), "r"(last)
               : "memory");
  return old;
}

// The first byte of the block's dynamic shared memory, on a multiple of 1,024.
inline u8* shared_bytes() {
  extern __shared__ __align__(1024) u8 fulmen_shared[];
  return fulmen_shared;
}

}  // namespace fulmen::ptx
