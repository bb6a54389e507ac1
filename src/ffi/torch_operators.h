// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Kernels of the operators that run any call: what compiled programs, modes and autograd functions
// end in. Their schemas are in python/fulmen/_torch/operators.py.
#pragma once

#include "ffi/torch_abi.h"

namespace fulmen::ffi {

// (arrays, options, outputs) -> (o, lse or None, stats or None)
void attention_kernel(TorchValue* stack);

// (do, dlse, o, stats or lse, arrays, options, need) -> (dq, dk, dv, dbias, dsinks), each or None
void attention_backward_kernel(TorchValue* stack);

}  // namespace fulmen::ffi
