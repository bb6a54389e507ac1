// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
#include "mixed_decodes.h"

#include <vector>

#include "emulator/launch.h"
#include "gpu/params.h"
#include "kernels/decode_sm80/decode_sm80.cuh"

namespace fulmen::test {
namespace {

constexpr DecodeSm80Config kDecodes{
    .score = {.mask_kind = MaskKind::kRight, .varlen = true, .stats = true},
    .d_qk = 64,
    .d_v = 64,
    .splits = 4,
    .ragged = true,
    .paged = true,
    .mixed = true};

}  // namespace

void run_decodes(const Problem& problem, u32 seed) {
  constexpr i32 kWorkers = 3;
  constexpr u64 kStamp = 0x5eed00000000;
  std::vector<u64> counters(kWorkers + 1, ~u64{0});
  std::vector<float> parts(2 * kWorkers * kDecodes.part_floats() + 4);
  const u64 first = (reinterpret_cast<u64>(parts.data()) + 15) / 16 * 16;
  const DecodeSm80Params params{gpu::attention_params(problem),
                                static_cast<i32>(problem.group_size()),
                                1,
                                kStamp,
                                counters.data(),
                                reinterpret_cast<float*>(first),
                                score_unit(kDecodes, problem.score_map.scale),
                                kWorkers - 1};
  emulator::launch(
      {kWorkers, kDecodes.threads(), kDecodes.shared_bytes(), seed, true, "decode_sm80"},
      [&] { decode_sm80<kDecodes>(params); });
}

}  // namespace fulmen::test
