// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// backward_sm90 with tiles of 128 columns.
#include "backward_text.h"

namespace fulmen::test {

constinit const BackwardKernel kBackwardD128Full =
    backward_kernel<BackwardSm90Config{.register_dims = 16}>("d128_full");

constinit const BackwardKernel kBackwardD128Causal =
    backward_kernel<BackwardSm90Config{.score = {.mask_kind = MaskKind::kRight}}>("d128_causal");

constinit const BackwardKernel kBackwardD128Window =
    backward_kernel<BackwardSm90Config{.score = {.mask_kind = MaskKind::kBoth}}>("d128_window");

constinit const BackwardKernel kBackwardD128Stats = backward_kernel<BackwardSm90Config{
    .register_dims = 16, .score = {.mask_kind = MaskKind::kRight, .stats = true}}>("d128_stats");

constinit const BackwardKernel kBackwardD128NoTurns =
    backward_kernel<BackwardSm90Config{.ping_pong = false, .early_dv = false, .staggered = false}>(
        "d128_no_turns");

constinit const BackwardKernel kBackwardD128NoDq =
    backward_kernel<BackwardSm90Config{.dq = false, .score = {.mask_kind = MaskKind::kRight}}>(
        "d128_no_dq");

constinit const BackwardKernel kBackwardD128Ordered =
    backward_kernel<BackwardSm90Config{.deterministic = true, .staggered = false}>("d128_ordered");

constinit const BackwardKernel kBackwardD128Sequences = backward_kernel<BackwardSm90Config{
    .score = {.mask_kind = MaskKind::kBoth, .varlen = true, .stats = true}}>("d128_sequences");

}  // namespace fulmen::test
