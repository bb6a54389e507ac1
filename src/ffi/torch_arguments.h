// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arguments of a kernel of PyTorch's dispatcher, in the order of its schema: each is read once,
// and then ours. Those that the operators of python/fulmen/_torch/operators.py share are read at
// once: the arrays from q to rng, then the options.
#pragma once

#include <string>
#include <vector>

#include "ffi/kept_options.h"
#include "ffi/torch_abi.h"
#include "ffi/torch_array.h"
#include "ffi/torch_call.h"

namespace fulmen::ffi {

class TorchArguments {
 public:
  explicit TorchArguments(const TorchValue* stack) : next_(stack) {}

  TorchArray array() { return TorchArray(*next_++); }
  TorchArray optional_array() { return TorchArray(optional(0)); }  // none: not given
  TorchValue optional(TorchValue otherwise);                       // what a `?` of the schema holds
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  double real();
  bool flag() { return (*next_++ & 0xff) != 0; }
  std::string text();
  TorchValue bits(size_t count);  // of a list of flags, the first lowest

 private:
  const TorchValue* next_;
};

// As a result of a type with `?`; one that is not given is None.
TorchValue optional_result(TorchArray array);

// Arrays and options as such an operator has them.
class TorchOperands {
 public:
  explicit TorchOperands(TorchArguments* in);

  const TorchArray& operator[](ArrayPlace place) const { return arrays_[place]; }
  // Throws Refusal: a name or an array that is not allowed.
  TorchCall call() const;
  int32_t out_dtype() const { return out_dtype_; }  // PyTorch's number, or kSameDtype

 private:
  Kept kept() const;
  void take_lots(TorchCall* call) const;

  std::vector<TorchArray> arrays_;
  fulmen_problem options_;
  std::string alignment_, layout_, backend_, implementation_, precision_;
  int32_t out_dtype_;
};

}  // namespace fulmen::ffi
