// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tables of this translation unit's instruction set: its kernels, and loops that do one thing
// as fast as it can, which rates are measured by.
#pragma once

#include "cpu/isa/expression_steps.h"
#include "cpu/isa/few_row_scores.h"
#include "cpu/isa/few_row_values.h"
#include "cpu/isa/products.h"
#include "cpu/isa/softmax.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

template <class Real>
constexpr Kernels<Real> table(const char* isa) {
  return {
      isa,
      kVectorBytes,
      kLanes<Real>,
      load_rows<Real>,
      store_rows<Real>,
      transpose<Real>,
      multiply<Real, Real>,
      all_finite<Real>,
      softmax<Real>,
      gradient<Real>,
      start_scores<Real>,
      run_steps<Real>,
      add_offsets,
      {arrange_rows<Real>, dot_rows<Real>, weigh_rows<StoresWeights<Real>, Real>, add_rows<Real>}};
}

constexpr int kChains = kTileRows * kTileVectors;  // the sums of a register tile

// Of what is not used, nothing would be computed.
inline void use(FloatVector (&chains)[kChains]) {
  FloatVector total{};
  for (const FloatVector& chain : chains) total += chain;
  [[maybe_unused]] volatile float sink = total[0];
}

inline i64 multiply_adds(i64 steps) {
  FloatVector chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = broadcast(static_cast<float>(i));
  const FloatVector factor = broadcast(0.999f), term = broadcast(0.5f);
  for (i64 step = 0; step < steps; ++step) {
#pragma GCC unroll 24
    for (FloatVector& chain : chains) chain = multiply_add(chain, factor, term);
  }
  use(chains);
  return steps * kChains * kWidth<float> * 2;
}

inline i64 pair_products(i64 steps) {
  FloatVector chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = broadcast(static_cast<float>(i));
  const Vector<u32> a = broadcast(0x3f803f00u), b = broadcast(0x3e003d80u);
  for (i64 step = 0; step < steps; ++step) {
#pragma GCC unroll 24
    for (FloatVector& chain : chains) chain = multiply_add(a, b, chain);
  }
  use(chains);
  return steps * kChains * kWidth<float> * 4;
}

// Reads `bytes` bytes, up to the next whole step.
inline void read_all(const char* from, i64 bytes) {
  constexpr int kLoads = 8;
  constexpr i64 kAhead = 4096;
  Vector<u32> seen[kLoads] = {};
  for (i64 at = 0; at < bytes; at += kLoads * kVectorBytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kLoads; ++i) {
      const char* const next = from + at + i * kVectorBytes;
      __builtin_prefetch(next + kAhead);
      Vector<u32> some;
      __builtin_memcpy(&some, next, sizeof(some));
      seen[i] |= some;
    }
  }
  for (int i = 1; i < kLoads; ++i) seen[0] |= seen[i];
  [[maybe_unused]] volatile u32 sink = seen[0][0];
}

constexpr IsaLoops kLoops = {multiply_adds, nullptr, read_all, kVectorBytes * 8};

constexpr IsaLoops with_products(i64 (*products)(i64)) {
  IsaLoops loops = kLoops;
  loops.pair_products = products;
  return loops;
}

}  // namespace

}  // namespace fulmen::cpu
