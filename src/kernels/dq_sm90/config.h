// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What backward_dq_sm90 is given; its config is the forward kernel's.
#pragma once

#include "kernels/backward_sm90/config.h"

namespace fulmen {

// What backward_dq_sm90 is given, by value. `forward` as the forward kernel has it, with the option
// arrays and dq in its arrays; rows, delta and spoiled as in BackwardParams. Boxes of the maps: Q
// and dO (64, 64), K and V (64, kv_rows).
struct BackwardDqParams {
  BackwardTensorMaps maps;
  ForwardParams forward;
  i64 rows_of_head;
  const float* rows;
  const float* delta;
  u32* spoiled;
  bool comes_first;  // as in BackwardParams
};

}  // namespace fulmen
