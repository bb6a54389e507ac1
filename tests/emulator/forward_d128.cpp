// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 at head dimension 128.
#include "forward_kernel.h"

namespace fulmen::test {

constinit const ForwardKernel kD128Causal =
    forward_kernel<ForwardSm90Config{.kv_rows = 64,
                                     .stages = 4,
                                     .q_slots = 3,
                                     .cache_hints = true,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d128_causal");

constinit const ForwardKernel kD128QRegisters =
    forward_kernel<ForwardSm90Config{.warpgroups = 3,
                                     .kv_rows = 80,
                                     .q_register_dims = 64,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d128_q_registers");

constinit const ForwardKernel kD128SumGrew =
    forward_kernel<ForwardSm90Config{.shift_rule = ShiftRule::kWhenSumGrew,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d128_sum_grew");

constinit const ForwardKernel kD128EveryBlock =
    forward_kernel<ForwardSm90Config{.d_v = 64,
                                     .kv_rows = 64,
                                     .shift_rule = ShiftRule::kEveryBlock,
                                     .stage_output = false,
                                     .overlap = false,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d128_every_block");

}  // namespace fulmen::test
