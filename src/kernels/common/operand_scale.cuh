// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Scales of q and k of 8 bits where heads have them, as kernels of tensor cores take them: one
// factor of the scores. Used by forward_sm80.
#pragma once

#include "kernels/attention/kv_scale.cuh"
#include "kernels/params.h"

namespace fulmen {

inline float load_scale(const ArrayView& scales, i64 at) {
  return kv_scale(reinterpret_cast<const float*>(scales.data)[at]);
}

// What scores are multiplied by beside the scale of the softmax: a sign, which may be 0 or NaN, and
// a positive number, by which softmaxes know scales.
struct OperandScale {
  float sign = 1, size = 1;
};
inline OperandScale operand_scale(const AttentionParams& p, i64 batch, i64 head, i64 kv_head) {
  float scale = 1;
  if (p.q_scale.present()) scale = load_scale(p.q_scale, p.q_scale.offset(batch, head, 0, 0));
  if (p.k_scale.present()) scale *= load_scale(p.k_scale, p.k_scale.offset(batch, kv_head, 0, 0));
  if (scale > 0) return {1, scale};
  if (scale < 0) return {-1, -scale};
  return {scale, 1};
}

}  // namespace fulmen
