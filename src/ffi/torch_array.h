// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's tensors as a kernel of its dispatcher holds them, and memory for results. Only where
// torch_abi() is not null.
#pragma once

#include "ffi/torch_abi.h"
#include "ffi/tvm_ffi_abi.h"

namespace fulmen::ffi {

// A reference to a tensor; it may be undefined.
class TorchArray {
 public:
  explicit TorchArray(TorchTensor owned) : owned_(owned) {}
  explicit TorchArray(TorchValue owned) : TorchArray(reinterpret_cast<TorchTensor>(owned)) {}
  TorchArray(TorchArray&& other) noexcept : owned_(other.owned_) { other.owned_ = nullptr; }
  TorchArray& operator=(TorchArray&&) = delete;
  ~TorchArray();

  bool is_defined() const;
  // Throws Refusal for a dtype that attention does not know.
  DLTensor dlpack() const;
  TorchValue released();  // as a result, or for a call

 private:
  TorchTensor owned_;
};

TorchArray undefined();

// Each throws Refusal where PyTorch has no memory left.
// Of the dtype, device and extents of x but for the last; in memory its axes are in the order of
// those of x, and its rows are dense.
TorchArray empty_like(const DLTensor& x, int64_t last_extent);
// As fulmen.h wants stats of q: (..., 2), contiguous, float64 of float64, float32 of all else.
TorchArray empty_stats(const DLTensor& q, bool rows_before_heads);

}  // namespace fulmen::ffi
