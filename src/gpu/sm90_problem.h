// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the plans of both passes of sm90 read off a problem. Pure.
#pragma once

#include "core/problem.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen {

inline bool reads_sequences(const Problem& problem) {
  return problem.packed || problem.has(Array::kQLengths) || problem.has(Array::kKvLengths);
}

inline MaskKind mask_kind(const IntervalMask& mask) {
  if (mask.window_left != kNoLimit || mask.chunk > 0) return MaskKind::kBoth;
  if (mask.causal || mask.window_right != kNoLimit) return MaskKind::kRight;
  return MaskKind::kNone;
}

}  // namespace fulmen
