// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which kernels of sm80 answer drawn problems. Where one reads an array that a problem does not
// have it gets one that changes nothing: so a few kernels serve every set of options.
#pragma once

#include "core/problem.h"
#include "kernels/params.h"

namespace fulmen::test {

// float16 is bfloat16 but for conversions and one instruction: what else a score goes through is
// compiled for it only where FULMEN_EVERY_KERNEL is defined, as in test-full.
#ifdef FULMEN_EVERY_KERNEL
template <DType kDType>
constexpr bool kHasScoreTerms = true;
#else
template <DType kDType>
constexpr bool kHasScoreTerms = kDType != DType::kFloat16;
#endif

inline bool has_kernel(const Request& request) {
  const Options& options = request.options;
  const bool has_terms = options.dropout_p != 0 || options.softcap != 0 || options.scale <= 0 ||
                         request.arrays[Array::kBias].present() ||
                         request.arrays[Array::kAlibiSlopes].present();
  return kHasScoreTerms<DType::kFloat16> || !has_terms ||
         request.arrays[Array::kQ].dtype != DType::kFloat16;
}

// A mask that hides nothing, a bias of 0, one document. Config: ForwardSm80Config,
// BackwardSm80Config.
template <class Config>
AttentionParams with_neutral_arrays(AttentionParams p, const Config& config) {
  static u8 visible = 1;
  static u8 zero[8] = {};
  if (config.score.mask && !p.mask.present()) p.mask = {&visible, {}, DType::kBool};
  if (config.score.bias != DType::kNone && !p.bias.present())
    p.bias = {zero, {}, config.score.bias};
  if (config.score.documents && !p.q_ids.present()) p.q_ids = p.kv_ids = {zero, {}, DType::kInt64};
  return p;
}

}  // namespace fulmen::test
