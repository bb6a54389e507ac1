// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where a kernel of sm80 reads an array that a problem does not have it gets one that changes
// nothing: so a few kernels serve every set of options.
#pragma once

#include "kernels/params.h"

namespace fulmen::test {

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
