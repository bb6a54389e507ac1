// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 at head dimension 256.
#include "forward_kernel.h"

namespace fulmen::test {

constinit const ForwardKernel kD256Causal =
    forward_kernel<ForwardSm90Config{.d_qk = 256,
                                     .d_v = 256,
                                     .kv_rows = 64,
                                     .q_slots = 3,
                                     .q_register_dims = 96,
                                     .stage_output = false,
                                     .ping_pong = false,
                                     .score = {.mask_kind = MaskKind::kRight}}>("d256_causal");

}  // namespace fulmen::test
