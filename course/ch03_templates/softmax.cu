// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// P = softmax(S) row by row, a warp for each row. Type, columns and mask are known when the kernel
// is compiled: DTYPE, COLUMNS and CAUSAL come from the program that compiles it.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

// --8<-- [start:config]
// What a kernel is made for. A value of this type is a template argument, as in all of fulmen.
struct Config {
  DType dtype;
  i32 columns;
  bool causal;
};

// The type of a number, by its name: a template without a body, and one specialisation for each.
template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat32> {
  using Type = float;
};
template <>
struct ElementOf<DType::kFloat16> {
  using Type = f16;
};

constexpr float as_float(float x) { return x; }  // beside to_float(f16) of kernels/base.cuh
constexpr float as_float(f16 x) { return to_float(x); }
// --8<-- [end:config]

struct Params {
  const void* s;  // (row, column)
  void* p;        // (row, column)
};

// --8<-- [start:softmax]
template <Config kConfig>
struct RowSoftmax {
  using Element = typename ElementOf<kConfig.dtype>::Type;
  static constexpr i32 kLanes = 16 / static_cast<i32>(sizeof(Element));  // one load moves 16 bytes
  static constexpr i32 kVectors = kConfig.columns / (32 * kLanes);       // of a thread
  static_assert(kVectors * 32 * kLanes == kConfig.columns, "rows are whole vectors of a warp");
  struct alignas(16) Vector {
    Element lane[kLanes];
  };

  static void run(const Params& params, i32 row, i32 thread) {
    const Vector* const from = static_cast<const Vector*>(params.s) + row * kVectors * 32;
    Vector* const to = static_cast<Vector*>(params.p) + row * kVectors * 32;
    float x[kVectors][kLanes];  // in registers: every index below is a constant once unrolled
    float m = -kInfinity<float>, l = 0;
#pragma unroll
    for (i32 i = 0; i < kVectors; ++i) {
      const i32 first = (32 * i + thread) * kLanes;  // column
      Vector loaded{};
      if (!kConfig.causal || first <= row) loaded = from[32 * i + thread];
#pragma unroll
      for (i32 lane = 0; lane < kLanes; ++lane) {
        x[i][lane] = as_float(loaded.lane[lane]);
        if constexpr (kConfig.causal) {  // else these lines are not compiled
          if (first + lane > row) x[i][lane] = -kInfinity<float>;
        }
        m = ptx::max(m, x[i][lane]);
      }
    }
    for (u32 mask = 16; mask > 0; mask /= 2) m = ptx::max(m, ptx::shuffle_xor(m, mask));
#pragma unroll
    for (i32 i = 0; i < kVectors; ++i) {
#pragma unroll
      for (i32 lane = 0; lane < kLanes; ++lane) {
        l += x[i][lane] = ptx::exp2((x[i][lane] - m) * kLog2E<float>);
      }
    }
    for (u32 mask = 16; mask > 0; mask /= 2) l += ptx::shuffle_xor(l, mask);
#pragma unroll
    for (i32 i = 0; i < kVectors; ++i) {
      Vector stored;
#pragma unroll
      for (i32 lane = 0; lane < kLanes; ++lane) {
        if constexpr (kConfig.dtype == DType::kFloat16) {
          stored.lane[lane] = to_f16(x[i][lane] / l);
        } else {
          stored.lane[lane] = x[i][lane] / l;
        }
      }
      to[32 * i + thread] = stored;
    }
  }
};
// --8<-- [end:softmax]

extern "C" __global__ void fulmen_kernel(const Params p) {
  constexpr Config kConfig{.dtype = DType::DTYPE, .columns = COLUMNS, .causal = CAUSAL};
  const i32 thread = static_cast<i32>(ptx::thread_index());
  const i32 row = static_cast<i32>(ptx::block_index()) * 4 + thread / 32;
  RowSoftmax<kConfig>::run(p, row, thread % 32);
}
