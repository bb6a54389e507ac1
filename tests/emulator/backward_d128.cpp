// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// backward_sm90 with tiles of 128 columns.
#include "backward_text.h"

namespace fulmen::test {

constinit const BackwardKernel kBackwardD128Full =
    backward_kernel<BackwardConfig{.register_dims = 16}>("d128_full");

constinit const BackwardKernel kBackwardD128Causal =
    backward_kernel<BackwardConfig{.mask = MaskKind::kUpper}>("d128_causal");

constinit const BackwardKernel kBackwardD128Window =
    backward_kernel<BackwardConfig{.mask = MaskKind::kBoth}>("d128_window");

constinit const BackwardKernel kBackwardD128Stats = backward_kernel<BackwardConfig{
    .mask = MaskKind::kUpper, .has_stats = true, .register_dims = 16}>("d128_stats");

constinit const BackwardKernel kBackwardD128NoTurns =
    backward_kernel<BackwardConfig{.take_turns = false, .early_dv = false, .spread = false}>(
        "d128_no_turns");

constinit const BackwardKernel kBackwardD128NoDq =
    backward_kernel<BackwardConfig{.mask = MaskKind::kUpper, .dq = false}>("d128_no_dq");

constinit const BackwardKernel kBackwardD128Ordered =
    backward_kernel<BackwardConfig{.ordered = true, .spread = false}>("d128_ordered");

constinit const BackwardKernel kBackwardD128Sequences =
    backward_kernel<BackwardConfig{.mask = MaskKind::kBoth, .has_stats = true, .sequences = true}>(
        "d128_sequences");

}  // namespace fulmen::test
