// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The library's kernels in PyTorch's dispatcher, and how one says no: by an exception that PyTorch
// turns into Python's RuntimeError. Its status is kept, so that a caller in Python can raise the
// class that fits.
#pragma once

#include <stdexcept>

#include "ffi/refusal.h"
#include "ffi/torch_abi.h"

namespace fulmen::ffi {

inline thread_local Refusal last_refusal = {FULMEN_OK, ""};

template <void (*kKernel)(TorchValue* stack)>
void boxed(TorchValue* stack, uint64_t, uint64_t) {
  try {
    kKernel(stack);
    last_refusal.status = FULMEN_OK;
  } catch (const Refusal& refusal) {
    last_refusal = refusal;
    throw std::runtime_error(refusal.sentence);
  }
}

// Adds a kernel to an operator under a dispatch key. False: PyTorch did not take it.
bool add_kernel(const char* name_space, const char* key, const char* name, TorchKernel kernel);

// Those of PyTorch's own attention node (torch_sdpa_node.cpp).
bool add_sdpa_node(const char* key, const char* autograd_key);

}  // namespace fulmen::ffi
