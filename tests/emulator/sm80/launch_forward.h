// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80 on the emulator, for drawn problems. Where a kernel reads an array that a problem
// does not have it gets one that changes nothing: so a few kernels serve every set of options.
#pragma once

#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "kernels/forward_sm80.cuh"

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

template <Sm80Config kConfig>
void launch(const AttentionParams& given, unsigned seed) {
  const AttentionParams p = with_neutral_arrays(given, kConfig);
  const Sm80Params params{p, {p, kConfig, 2}};
  const i64 blocks = forward_sm80_blocks(p, kConfig);
  if (blocks == 0) return;
  emulator::launch({static_cast<i32>(blocks), kConfig.threads(), kConfig.forward_shared_bytes(),
                    seed, false, "forward_sm80", is_sampled(seed)},
                   [&] { forward_sm80<kConfig>(params); });
}

}  // namespace fulmen::test
