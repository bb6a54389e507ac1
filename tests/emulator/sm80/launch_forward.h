// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80 on the emulator, for drawn problems.
#pragma once

#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "emulator/sm80/neutral_arrays.h"
#include "kernels/forward_sm80/forward_sm80.cuh"

namespace fulmen::test {

template <ForwardSm80Config kConfig>
void launch(const AttentionParams& given, unsigned seed, emulator::Counters* counters = nullptr) {
  const AttentionParams p = with_neutral_arrays(given, kConfig);
  const ForwardSm80Params params{{p, kConfig, 2}, {}, p};
  const i64 blocks = num_forward_sm80_blocks(p, kConfig);
  if (blocks == 0) return;
  emulator::launch({.blocks = blocks,
                    .threads = kConfig.threads(),
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .kernel = "forward_sm80",
                    .check = is_sampled(seed),
                    .counters = counters},
                   [&] { forward_sm80<kConfig>(params); });
}

}  // namespace fulmen::test
