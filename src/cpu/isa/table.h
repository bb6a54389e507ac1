// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table of this translation unit's instruction set.
#pragma once

#include "cpu/isa/convert.h"
#include "cpu/isa/gradient.h"
#include "cpu/isa/multiply.h"
#include "cpu/isa/rows.h"
#include "cpu/isa/softmax.h"

namespace fulmen::cpu {
namespace {

template <class Real>
constexpr Kernels<Real> table(const char* isa) {
  return {isa,           kVectorBytes,    kLanes<Real>,   load_rows,
          store_rows,    transpose<Real>, multiply<Real>, all_finite<Real>,
          softmax<Real>, gradient<Real>};
}

}  // namespace
}  // namespace fulmen::cpu
