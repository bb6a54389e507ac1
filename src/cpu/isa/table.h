// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table of this translation unit's instruction set.
#pragma once

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
      {arrange_rows<Real>, dot_rows<Real>, weigh_rows<StoresWeights<Real>, Real>, add_rows<Real>}};
}

}  // namespace

}  // namespace fulmen::cpu
