// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sum in float32 of what a tensor core adds of e4m3, O += P V of some blocks of keys at a time:
// its own sums keep 14 bits (emulator/tensor_core.h). Up to 128 dims a second sum fits the
// registers. Beyond, it lies in global memory, a place for each warpgroup of the grid, which stays
// in the L2: O is stored there the first time and then added by red.global.add, so that no thread
// waits for it, and comes back once, at the end of a work tile.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// What O += P V adds to, in the order of use: accumulates(), whether to O as it is; count(), that
// the product of a block of keys is there; scale(), by which all earlier ones are multiplied, row
// by row; finish(), after the last one, O is the sum of all.

// Of 16 bits O itself.
template <ForwardSm90Config kConfig>
struct Unpromoted {
  using Output = float[kConfig.o_dims() / 2];
  bool begun = false;

  explicit Unpromoted(const ForwardParams&) {}
  bool accumulates() const { return begun; }
  void count(const Output&) { begun = true; }
  void scale(const float (&)[2]) {}
  void finish(Output&) {}
};

// The number of products.
template <ForwardSm90Config kConfig>
struct PromotionCount {
  u32 products = 0;
  bool accumulates() const { return products % u32(kConfig.promoted_blocks) != 0; }
  bool begun() const { return products >= u32(kConfig.promoted_blocks); }
};

template <ForwardSm90Config kConfig>
struct PromotedInRegisters : PromotionCount<kConfig> {
  using Output = float[kConfig.o_dims() / 2];
  Output sum = {};

  explicit PromotedInRegisters(const ForwardParams&) {}
  void count(const Output& O) {
    ++this->products;
    if (this->accumulates()) return;
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; ++i) sum[i] += O[i];
  }
  void scale(const float (&factor)[2]) { scale_rows(sum, factor); }
  void finish(Output& O) {
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; ++i) O[i] += sum[i];
  }
};

// Four numbers of a thread lie beside those of its neighbours.
template <ForwardSm90Config kConfig>
struct PromotedInMemory : PromotionCount<kConfig> {
  using Output = float[kConfig.o_dims() / 2];
  static constexpr i32 kStride = 4 * 128 * kConfig.warpgroups;

  const ForwardParams& params;

  explicit PromotedInMemory(const ForwardParams& params_) : params(params_) {}

  float* place() const {
    return params.sums + i64{ptx::block_index()} * (kStride / 8 * kConfig.o_dims()) +
           4 * i32(ptx::thread_index());
  }
  void count(const Output& O) {
    ++this->products;
    if (this->accumulates()) return;
    float* const sum = place();
    const bool is_first = this->products == u32(kConfig.promoted_blocks);
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; i += 4) {
      float* const at = sum + i / 4 * kStride;
      if (is_first) {
        ptx::store_l2_x4(at, {{O[i], O[i + 1], O[i + 2], O[i + 3]}});
      } else {
        ptx::reduce_add_x4(at, O[i], O[i + 1], O[i + 2], O[i + 3]);
      }
    }
  }
  void scale(const float (&factor)[2]) {
    if (!this->begun()) return;
    float* const sum = place();
#pragma unroll 1
    for (i32 i = 0; i < kConfig.o_dims() / 8; ++i) {
      float* const at = sum + i * kStride;
      ptx::F32x4 x = ptx::load_l2_x4(at);
#pragma unroll
      for (i32 w = 0; w < 4; ++w) x.word[w] *= factor[w / 2];
      ptx::store_l2_x4(at, x);
    }
  }
  void finish(Output& O) {
    if (!this->begun()) return;
    const float* const sum = place();
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; i += 4) {
      const ptx::F32x4 x = ptx::load_l2_x4(sum + i / 4 * kStride);
#pragma unroll
      for (i32 w = 0; w < 4; ++w) O[i + w] += x.word[w];
    }
  }
};

template <ForwardSm90Config kConfig>
constexpr auto promoted_kind() {
  if constexpr (kConfig.promotes_in_memory()) {
    return [](const ForwardParams& params) { return PromotedInMemory<kConfig>(params); };
  } else if constexpr (kConfig.has_8_bits()) {
    return [](const ForwardParams& params) { return PromotedInRegisters<kConfig>(params); };
  } else {
    return [](const ForwardParams& params) { return Unpromoted<kConfig>(params); };
  }
}
template <ForwardSm90Config kConfig>
using Promoted = decltype(promoted_kind<kConfig>()(*static_cast<const ForwardParams*>(nullptr)));

}  // namespace fulmen
