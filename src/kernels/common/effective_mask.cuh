// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of a mask that a kernel has to look at, by its config's MaskKind: what the host found to
// have no effect is known to have none when the kernel is compiled.
#pragma once

#include "kernels/forward_sm90/config.h"

namespace fulmen {

template <auto kConfig>
constexpr IntervalMask effective_mask(const IntervalMask& mask) {
  if constexpr (kConfig.mask == MaskKind::kLength) return IntervalMask{};
  if constexpr (kConfig.mask == MaskKind::kUpper) {
    IntervalMask upper;
    upper.causal = mask.causal;
    upper.window_right = mask.window_right;
    upper.prefix = mask.prefix;
    return upper;
  }
  return mask;
}

}  // namespace fulmen
