// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Matrix products on tensor cores, of one warp and of a warpgroup.
//
// mma.sync, since Ampere: D (16 x 8, float32) += A (16 x 16) B (16 x 8), 16-bit inputs. Of lane l,
// g = l / 4, q = l % 4:
//   d   0, 1: row g, columns 2q, 2q + 1     2, 3: row g + 8, the same columns
//   a   0: row g, columns 2q, 2q + 1   1: row g + 8   2: row g, columns + 8   3: row g + 8, + 8
//   b   0: rows 2q, 2q + 1, column g   1: rows + 8
// so that a pair of neighbouring d, packed, is an a of the next product. PTX ISA 9.0, 9.7.14.5.
//
// wgmma, on Hopper, of a warpgroup: D (64 x N, float32, in registers) (+)= A (64 x 16) B (16 x N),
// 16-bit inputs, or A (64 x 32) B (32 x N) of e4m3. The products are asynchronous: fence before the
// first of a batch, commit it, wait before touching D or overwriting A, B. PTX ISA 9.0,
// section 9.7.15. The fragment: float i of thread t is row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 %
// 2), column 8 (i / 4) + 2 (t % 4) + i % 2. The macros spell out operand lists, which C++ templates
// cannot; they end with this file.
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

// movmatrix.trans: an 8 x 8 matrix of 16-bit numbers, of which lane l has row l / 4, columns
// 2 (l % 4) and + 1, transposed.
inline u32 transpose_matrix(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
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

// mma.sync.aligned.m16n8k32.row.col of e4m3, from Ada on (Hopper widens to float16): bytes take the
// place of 16-bit numbers, four of a, or of b, where two are above.
inline void mma_m16n8k32_e4m3(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

// wgmma.fence: orders this warp's register accesses before later wgmma.
inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: closes the group of products issued so far.
inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: at most kPending groups, the youngest, are still running.
template <i32 kPending>
inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: keeps reads of an accumulator behind the wait that was just made, where the
// compiler would move them before it.
template <i32 kFloats>
inline void wgmma_fence_operand(float (&d)[kFloats]) {
#pragma unroll
  for (i32 i = 0; i < kFloats; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A matrix in shared memory as the lower word of a descriptor. Its layout is in the upper word, a
// constant:
//   kSwizzledRows        rows of 64 elements (128 bytes) with 128-byte swizzle, 1,024 bytes from
//   one
//                        group of 8 rows to the next. `leading_bytes` leads from 64 columns to the
//                        next 64 where the columns are the N of a transposed B (row-major V), and
//                        is ignored elsewhere.
//   plain_strides(stride)  no swizzle: 8 rows of 8 elements (16 bytes) lie together. From 8 rows to
//                        the next 8 it is `stride` bytes, from 8 columns to the next 8
//                        `leading_bytes`; with a transposed B the other way round.
constexpr u32 wgmma_descriptor(u32 shared, u32 leading_bytes) {
  return ((shared & 0x3ffffu) >> 4) | ((leading_bytes >> 4) << 16);
}
inline constexpr u32 kSwizzledRows = 0x40000040;
constexpr u32 plain_strides(u32 stride_bytes) { return stride_bytes >> 4; }

#define FULMEN_D8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FULMEN_D16 FULMEN_D8(0), FULMEN_D8(8)
#define FULMEN_D24 FULMEN_D16, FULMEN_D8(16)
#define FULMEN_D32 FULMEN_D24, FULMEN_D8(24)
#define FULMEN_D40 FULMEN_D32, FULMEN_D8(32)
#define FULMEN_D48 FULMEN_D40, FULMEN_D8(40)
#define FULMEN_D56 FULMEN_D48, FULMEN_D8(48)
#define FULMEN_D64 FULMEN_D56, FULMEN_D8(56)
#define FULMEN_D80 FULMEN_D64, FULMEN_D8(64), FULMEN_D8(72)
#define FULMEN_D88 FULMEN_D80, FULMEN_D8(80)
#define FULMEN_D96 FULMEN_D88, FULMEN_D8(88)
#define FULMEN_D128 FULMEN_D96, FULMEN_D8(96), FULMEN_D8(104), FULMEN_D8(112), FULMEN_D8(120)

#define FULMEN_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FULMEN_R24 FULMEN_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FULMEN_R32 FULMEN_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FULMEN_R40 FULMEN_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FULMEN_R48 FULMEN_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FULMEN_R56 FULMEN_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FULMEN_R64 FULMEN_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FULMEN_R80                                                 \
  FULMEN_R64                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, " \
  "%76, %77, %78, %79"
#define FULMEN_R88 FULMEN_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FULMEN_R96 FULMEN_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FULMEN_R128                                                                            \
  FULMEN_R96                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "                                 \
  "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, " \
  "%121, %122, %123, %124, %125, %126, %127"

#define FULMEN_SS(N, TYPES, R, A, B, P, T, H)                                                 \
  asm volatile(                                                                               \
      "{.reg .pred p; .reg .b32 h; .reg .b64 a, b; setp.ne.b32 p, " P ", 0; mov.b32 h, " H    \
      ";"                                                                                     \
      "mov.b64 a, {" A ", h}; mov.b64 b, {" B                                                 \
      ", h};"                                                                                 \
      "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" FULMEN_R##R "}, a, b, p, 1, 1" T ";}" \
      : FULMEN_D##R                                                                           \
      : "r"(a), "r"(b), "r"(static_cast<i32>(accumulate)), "n"(kTransposeB ? 1 : 0), "n"(kUpper))

#define FULMEN_RS(N, TYPES, R, A0, A1, A2, A3, B, P, T, H)                                       \
  asm volatile("{.reg .pred p; .reg .b32 h; .reg .b64 b; setp.ne.b32 p, " P ", 0; mov.b32 h, " H \
               ";"                                                                               \
               "mov.b64 b, {" B                                                                  \
               ", h};"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" FULMEN_R##R                     \
               "}, {" A0 ", " A1 ", " A2 ", " A3 "}, b, p, 1, 1" T ";}"                          \
               : FULMEN_D##R                                                                     \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(static_cast<i32>(accumulate)),  \
                 "n"(kTransposeB ? 1 : 0), "n"(kUpper))

// wgmma.mma_async m64nNk16: D = A B, plus D where `accumulate`. wgmma_ss: A and B by descriptor.
// wgmma_rs: A in registers, in the layout of D with neighbouring columns packed into one register.
// kTransposeB: B lies K x N in shared memory (row-major V), else N x K (row-major K). kUpper: the
// upper word of all descriptors.
// m64nNk32 of e4m3: 32 columns of A take the bytes of 16 of 16 bits; in registers, a is
//   0: row g, columns 4q .. 4q + 3   1: row g + 8   2: row g, columns + 16   3: row g + 8, + 16
// and B is N x K alone. Its sums keep 14 bits (src/emulator/tensor_core.h).
#define FULMEN_WGMMA(N, R, X0, X1, X2, X3, X4, X5, X6, X7)                       \
  template <DType kDType, bool kTransposeB, u32 kUpper = kSwizzledRows>          \
  inline void wgmma_ss(float (&d)[N / 2], u32 a, u32 b, bool accumulate) {       \
    if constexpr (kDType == DType::kFloat8E4M3) {                                \
      static_assert(!kTransposeB);                                               \
      FULMEN_SS(N, "k32.f32.e4m3.e4m3", R, X0, X1, X2, "", X4);                  \
    } else if constexpr (kDType == DType::kBFloat16) {                           \
      FULMEN_SS(N, "k16.f32.bf16.bf16", R, X0, X1, X2, ", 0, " X3, X4);          \
    } else {                                                                     \
      FULMEN_SS(N, "k16.f32.f16.f16", R, X0, X1, X2, ", 0, " X3, X4);            \
    }                                                                            \
  }                                                                              \
  template <DType kDType, bool kTransposeB, u32 kUpper = kSwizzledRows>          \
  inline void wgmma_rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, \
                       bool accumulate) {                                        \
    if constexpr (kDType == DType::kFloat8E4M3) {                                \
      static_assert(!kTransposeB);                                               \
      FULMEN_RS(N, "k32.f32.e4m3.e4m3", R, X0, X1, X2, X3, X4, X5, "", X7);      \
    } else if constexpr (kDType == DType::kBFloat16) {                           \
      FULMEN_RS(N, "k16.f32.bf16.bf16", R, X0, X1, X2, X3, X4, X5, ", " X6, X7); \
    } else {                                                                     \
      FULMEN_RS(N, "k16.f32.f16.f16", R, X0, X1, X2, X3, X4, X5, ", " X6, X7);   \
    }                                                                            \
  }
FULMEN_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")
FULMEN_WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30", "%31")
FULMEN_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
FULMEN_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47")
FULMEN_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55")
FULMEN_WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63")
FULMEN_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
FULMEN_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87")
FULMEN_WGMMA(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95")
FULMEN_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103")
FULMEN_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")

#undef FULMEN_WGMMA
#undef FULMEN_RS
#undef FULMEN_SS
#undef FULMEN_D8
#undef FULMEN_D16
#undef FULMEN_D24
#undef FULMEN_D32
#undef FULMEN_D40
#undef FULMEN_D48
#undef FULMEN_D56
#undef FULMEN_D64
#undef FULMEN_D80
#undef FULMEN_D88
#undef FULMEN_D96
#undef FULMEN_D128
#undef FULMEN_R16
#undef FULMEN_R24
#undef FULMEN_R32
#undef FULMEN_R40
#undef FULMEN_R48
#undef FULMEN_R56
#undef FULMEN_R64
#undef FULMEN_R80
#undef FULMEN_R88
#undef FULMEN_R96
#undef FULMEN_R128

}  // namespace fulmen::ptx
