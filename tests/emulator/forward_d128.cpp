// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 at head dimension 128.
#include "forward_kernel.h"

namespace fulmen::test {

constinit const ForwardKernel kD128Causal = forward_kernel<AttentionConfig{
    .kv_rows = 64, .stages = 4, .q_slots = 3, .mask = MaskKind::kUpper, .cache_hints = true}>(
    "d128_causal");

constinit const ForwardKernel kD128QRegisters = forward_kernel<AttentionConfig{
    .warpgroups = 3, .kv_rows = 80, .q_register_dims = 64, .mask = MaskKind::kUpper}>(
    "d128_q_registers");

constinit const ForwardKernel kD128SumGrew = forward_kernel<AttentionConfig{
    .mask = MaskKind::kUpper, .shift_rule = ShiftRule::kWhenSumGrew}>("d128_sum_grew");

constinit const ForwardKernel kD128EveryBlock =
    forward_kernel<AttentionConfig{.d_v = 64,
                                   .kv_rows = 64,
                                   .mask = MaskKind::kUpper,
                                   .shift_rule = ShiftRule::kEveryBlock,
                                   .stage_output = false,
                                   .overlap = false}>("d128_every_block");

}  // namespace fulmen::test
