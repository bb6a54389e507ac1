// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's tensors as a kernel of its dispatcher holds them, and memory for results. Only where
// torch_abi() is not null.
#pragma once

#include <utility>

#include "ffi/torch_abi.h"
#include "ffi/tvm_ffi_abi.h"

namespace fulmen::ffi {

inline constexpr int32_t kSameDtype = -1;

// A reference to a tensor; it may be undefined, or none at all: not given.
class TorchArray {
 public:
  TorchArray() = default;
  explicit TorchArray(TorchTensor owned) : owned_(owned) {}
  explicit TorchArray(TorchValue owned) : TorchArray(reinterpret_cast<TorchTensor>(owned)) {}
  TorchArray(TorchArray&& other) noexcept : owned_(other.owned_) { other.owned_ = nullptr; }
  TorchArray& operator=(TorchArray&& other) noexcept {
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~TorchArray();

  bool is_given() const { return owned_ != nullptr; }
  bool is_defined() const;
  // Throws Refusal for a dtype or a device that no call takes.
  DLTensor dlpack() const;
  TorchValue released();  // as a result, or for a call

 private:
  friend TorchArray zero_beside(const DLTensor& x);

  TorchTensor owned_ = nullptr;
};

TorchArray undefined();

// Each throws Refusal where PyTorch has no memory left.
// Of the dtype, device and extents of x, but for the last one; in memory its axes are in the order
// of those of x, as torch.empty_like has them, and its rows are dense.
TorchArray empty_like(const DLTensor& x, int64_t last_extent, int32_t dtype = kSameDtype);
inline TorchArray empty_like(const DLTensor& x) {
  return empty_like(x, x.ndim == 0 ? 1 : x.shape[x.ndim - 1]);
}
// As fulmen.h wants lse of q, or stats: contiguous, float64 of float64, float32 of all else.
enum class Sums { kLse, kStats };
TorchArray empty_sums(const DLTensor& q, bool rows_before_heads, Sums kind);
// One zero, of the dtype and on the device of x.
TorchArray zero_beside(const DLTensor& x);

}  // namespace fulmen::ffi
