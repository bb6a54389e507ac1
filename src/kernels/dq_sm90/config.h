// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a call of backward_dq_sm90 is given; its config is ForwardSm90Config.
#pragma once

#include "kernels/backward_sm90/config.h"

namespace fulmen {

// By value. `forward`: as for forward_sm90, with dq among its arrays; lse_log2, delta and nonfinite
// as in BackwardParams. Boxes of the maps: Q and dO (64, 64), K and V (64, kv_rows).
struct BackwardDqParams {
  BackwardTensorMaps maps;
  ForwardParams forward;
  i64 padded_rows_per_head;
  const float* lse_log2;
  const float* delta;
  u32* nonfinite;
  bool comes_first;  // as in BackwardParams
};

}  // namespace fulmen
