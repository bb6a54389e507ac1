// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 at head dimension 64.
#include "forward_kernel.h"

namespace fulmen::test {

constinit const ForwardKernel kD64Full = forward_kernel<ForwardSm90Config{
    .d_qk = 64, .d_v = 64, .warpgroups = 3, .stages = 3, .q_slots = 6}>("d64_full");

constinit const ForwardKernel kD64Causal =
    forward_kernel<ForwardSm90Config{.d_qk = 64,
                                     .d_v = 64,
                                     .warpgroups = 3,
                                     .stages = 3,
                                     .q_slots = 6,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d64_causal");

constinit const ForwardKernel kD64Prefix =
    forward_kernel<ForwardSm90Config{.d_qk = 64,
                                     .d_v = 64,
                                     .warpgroups = 3,
                                     .kv_rows = 64,
                                     .stages = 4,
                                     .q_slots = 6,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d64_prefix");

constinit const ForwardKernel kD64Window =
    forward_kernel<ForwardSm90Config{.d_qk = 64,
                                     .d_v = 64,
                                     .warpgroups = 3,
                                     .kv_rows = 64,
                                     .score = {.mask_kind = MaskKind::kBoth}}>("d64_window");

constinit const ForwardKernel kD64OneStage =
    forward_kernel<ForwardSm90Config{.d_qk = 64,
                                     .d_v = 64,
                                     .kv_rows = 80,
                                     .stages = 1,
                                     .stage_output = false,
                                     .folded_scale = false,
                                     .score = {.mask_kind = MaskKind::kBoth}}>("d64_one_stage");

constinit const ForwardKernel kD64Chunk =
    forward_kernel<ForwardSm90Config{.d_qk = 64,
                                     .d_v = 64,
                                     .warpgroups = 1,
                                     .kv_rows = 64,
                                     .q_slots = 2,
                                     .shift_rule = ShiftRule::kWhenSumGrew,
                                     .score = {.mask_kind = MaskKind::kBoth}}>("d64_chunk");

constinit const ForwardKernel kD64Half =
    forward_kernel<ForwardSm90Config{.dtype = DType::kFloat16,
                                     .d_qk = 64,
                                     .d_v = 64,
                                     .kv_rows = 96,
                                     .shift_rule = ShiftRule::kWhenGrown,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d64_half");

}  // namespace fulmen::test
