// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays that change nothing, where a kernel of forward_sm80 reads one and a drawn problem has
// none: so a few kernels serve problems with every set of options.
#pragma once

#include "kernels/sm80_config.h"

namespace fulmen::test {

inline AttentionParams with_neutral_arrays(AttentionParams p, const Sm80Config& config) {
  static u8 visible = 1;
  static u8 zero[8] = {};
  if (config.mask && !p.mask.present()) p.mask = {&visible, {}, DType::kBool};
  if (config.bias != DType::kNone && !p.bias.present()) p.bias = {zero, {}, config.bias};
  if (config.documents && !p.q_ids.present()) {
    p.q_ids = p.kv_ids = {zero, {}, DType::kInt32};
  }
  return p;
}

}  // namespace fulmen::test
