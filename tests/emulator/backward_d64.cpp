// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// backward_sm90 with tiles of 64 columns.
#include "backward_text.h"

namespace fulmen::test {

constinit const BackwardKernel kBackwardD64Full =
    backward_kernel<BackwardSm90Config{.dims = 64, .q_rows = 128}>("d64_full");

constinit const BackwardKernel kBackwardD64Causal = backward_kernel<BackwardSm90Config{
    .dims = 64, .q_rows = 128, .register_dims = 16, .score = {.mask_kind = MaskKind::kRight}}>(
    "d64_causal");

constinit const BackwardKernel kBackwardD64Window = backward_kernel<BackwardSm90Config{
    .dims = 64, .q_rows = 128, .score = {.mask_kind = MaskKind::kBoth}}>("d64_window");

constinit const BackwardKernel kBackwardD64Half = backward_kernel<BackwardSm90Config{
    .dtype = DType::kFloat16, .dims = 64, .q_rows = 128, .score = {.mask_kind = MaskKind::kRight}}>(
    "d64_half");

constinit const BackwardKernel kBackwardD64DqOnly = backward_kernel<BackwardSm90Config{
    .dims = 64, .q_rows = 128, .dk = false, .dv = false, .score = {.mask_kind = MaskKind::kRight}}>(
    "d64_dq");

constinit const BackwardKernel kBackwardD64Ordered =
    backward_kernel<BackwardSm90Config{.dims = 64,
                                       .q_rows = 128,
                                       .deterministic = true,
                                       .staggered = false,
                                       .score = {.mask_kind = MaskKind::kRight}}>("d64_ordered");

constinit const BackwardKernel kBackwardD64Sequences = backward_kernel<BackwardSm90Config{
    .dims = 64, .q_rows = 128, .score = {.mask_kind = MaskKind::kRight, .varlen = true}}>(
    "d64_sequences");

}  // namespace fulmen::test
