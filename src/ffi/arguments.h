// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Reads the arguments of one call from Python, in order. The order is that of the structs of
// fulmen.h, and the Python side (python/fulmen/options.py, calls.py) writes it:
//
//   options   the fields of fulmen_problem from scale to implementation
//   arrays    reinterpret (int: bit i for array i), rows_before_heads (int), then the arrays of
//             fulmen_tensors from q to dsinks; None is absent, and so is all beyond the last one
#pragma once

#include "ffi/tvm_ffi_abi.h"
#include "fulmen/fulmen.h"

namespace fulmen::ffi {

class Arguments {
 public:
  Arguments(const TVMFFIAny* args, int32_t num_args) : next_(args), end_(args + num_args) {}

  bool empty() const { return next_ == end_; }

  // Each takes the next argument and throws Refusal, with its name, when it is something else.
  int64_t integer(const char* name);
  double real(const char* name);
  void* pointer(const char* name);
  const DLTensor* array(const char* name);  // null: None, or no argument left

  fulmen_tensor tensor(const char* name, bool rows_before_heads, bool reinterpret);
  fulmen_problem options();
  fulmen_tensors arrays();

 private:
  const TVMFFIAny& take(const char* name);

  const TVMFFIAny* next_;
  const TVMFFIAny* end_;
};

}  // namespace fulmen::ffi
