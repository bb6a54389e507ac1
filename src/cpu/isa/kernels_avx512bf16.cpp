// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels for AVX-512 with BF16: those of AVX-512, and products of bf16 by vdpbf16ps. And for
// AMX-BF16: the same, with products by tiles.
// cmake/isa.cmake gives this file its own flags; backend.cpp picks its tables at run time.

#include "cpu/isa/table.h"
#include "cpu/isa/tile_products.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

// Instructions are written as text, because a compiler's intrinsics want the numbers of tiles as
// literals, and because those of g++ 12 declare too little of the memory that they read.
struct AmxTiles {
  struct Config {
    u8 palette = 1;
    u8 start_row = 0;
    u8 reserved[14] = {};
    u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Config) == 64);

  static void configure() {
    static constexpr Config kConfig;
    asm volatile("ldtilecfg %0" ::"m"(kConfig));
  }
  static void release() { asm volatile("tilerelease"); }

  template <int kNumber>
  [[gnu::always_inline]] static inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kNumber));
  }
  template <int kNumber>
  [[gnu::always_inline]] static inline void load(const void* rows, i64 stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(kNumber)
                 : "memory");
  }
  template <int kNumber>
  [[gnu::always_inline]] static inline void store(void* rows, i64 stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride_bytes), "i"(kNumber)
                 : "memory");
  }
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] static inline void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

constexpr PairKernels kAmxKernels = with_tiles<AmxTiles>(kPairKernels);
constexpr PairKernels kAmxSplitKernels = with_tiles<AmxTiles>(kSplitPairKernels);

// A product of small integers, of which every sum is exact, by tiles and by vectors.
bool tiles_agree_with_vectors() {
  constexpr i64 kSize = 2 * kTile;
  Pair A[kSize * kSize], B[kSize * kLanes<float>];
  float by_tiles[kSize * kLanes<float>] = {}, by_vectors[kSize * kLanes<float>] = {};
  const auto integer = [](i64 i) {  // -3 to 4, as bf16
    return __builtin_bit_cast(u32, static_cast<float>(i * 5 % 8 - 3)) >> 16;
  };
  const auto pair = [&](i64 i) { return integer(i) | integer(i + 3) << 16; };
  for (i64 i = 0; i < kSize * kSize; ++i) A[i] = pair(i);
  for (i64 i = 0; i < kSize * kLanes<float>; ++i) B[i] = pair(3 * i + 1);
  Product<float, Pair> product{.rows = kSize,
                               .columns = kLanes<float>,
                               .depth = kSize,
                               .A = A,
                               .A_row_stride = kSize,
                               .A_depth_stride = 1,
                               .B = B,
                               .B_depth_stride = kLanes<float>,
                               .B_panel_stride = 0,
                               .C = by_vectors,
                               .C_row_stride = kLanes<float>};
  multiply<float, Pair>(product);
  product.C = by_tiles;
  AmxTiles::configure();
  multiply_by_tiles<AmxTiles>(product);
  AmxTiles::release();
  return __builtin_memcmp(by_tiles, by_vectors, sizeof(by_tiles)) == 0;
}

// Of tiles in registers, of ordinary numbers: with zeros some processors run faster.
i64 tile_products(i64 steps) {
  Pair numbers[kTile * kTile];
  for (i64 i = 0; i < kTile * kTile; ++i) {
    numbers[i] = 0x3f003e80u + static_cast<Pair>(i * 0x00050003);
  }
  AmxTiles::configure();
  AmxTiles::load<4>(numbers, 64);
  AmxTiles::load<5>(numbers, 64);
  AmxTiles::load<6>(numbers, 64);
  AmxTiles::load<7>(numbers, 64);
  for (i64 step = 0; step < steps; ++step) {
    AmxTiles::multiply_add<0, 4, 6>();
    AmxTiles::multiply_add<1, 4, 7>();
    AmxTiles::multiply_add<2, 5, 6>();
    AmxTiles::multiply_add<3, 5, 7>();
  }
  AmxTiles::release();
  return steps * 4 * kTile * kTile * kTile * 4;
}

}  // namespace

const IsaTables kTablesAvx512Bf16 = {table<float>("avx512bf16"), table<double>("avx512bf16"),
                                     with_products(pair_products), &kPairKernels};

const IsaTables kTablesAmx = {
    table<float>("amx"), table<double>("amx"), with_products(tile_products),
    &kAmxKernels,        &kAmxSplitKernels,    tiles_agree_with_vectors};

}  // namespace fulmen::cpu
