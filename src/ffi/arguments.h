// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Reads the arguments of one call from Python, in order. The order is that of the structs of
// fulmen.h, and the Python side (python/fulmen/options.py, calls.py) writes it:
//
//   options   the fields of fulmen_problem from scale to implementation, then precision
//   stream    int: a CUstream as its address; kCurrentStream: the one that the caller's framework
//             has told tvm-ffi (PyTorch does, by the tensors of the call). Ignored on the CPU
//   target    device (int, -1: where the arrays are), device_name (bytes or None): a GPU that the
//             call is planned for; the arrays are then anywhere and never read. without (int):
//             optimisations to leave out
//   arrays    reinterpret (int: bit i for array i), rows_before_heads (int), then the arrays of
//             fulmen_tensors from q to dsinks; None is absent, and so is all beyond the last one
#pragma once

#include <string>

#include "ffi/tensor_view.h"
#include "ffi/tvm_ffi_abi.h"
#include "fulmen/fulmen.h"

namespace fulmen::ffi {

inline constexpr int64_t kCurrentStream = -1;

// A caller's buffer of bytes: workspace, or room for a text.
struct Bytes {
  char* data = nullptr;
  size_t size = 0;
};

// The GPU that a plan is made for, whether or not arrays are on it.
struct Target {
  int32_t device = -1;
  std::string device_name;  // "": none
  uint32_t without = 0;

  bool named() const { return device >= 0 || !device_name.empty(); }
};

// The arrays of a call, and where they are.
struct Arrays {
  fulmen_tensors tensors;
  Place place;

  // Tells the library what it would otherwise ask the driver: where a call without a backend runs.
  void settle(fulmen_problem* problem) const;
  // What the library gets as the stream; null on the CPU.
  void* stream(int64_t given) const;
};

class Arguments {
 public:
  Arguments(const TVMFFIAny* args, int32_t num_args) : next_(args), end_(args + num_args) {}

  bool empty() const { return next_ == end_; }

  // Each takes the next argument and throws Refusal, with its name, when it is something else.
  int64_t integer(const char* name);
  double real(const char* name);
  fulmen_plan* plan();
  const DLTensor* array(const char* name);  // null: None, or no argument left

  Bytes host_bytes(const char* name);           // a vector of bytes that the host reads or writes
  Bytes bytes(const char* name, Place* place);  // one anywhere; its place is added
  std::string text(const char* name);           // bytes of the host, or None: ""
  fulmen_problem options();
  Target target();
  Arrays arrays();
  Arrays extents();  // the same, where only extents, strides and dtypes matter: no pointers

 private:
  const TVMFFIAny& take(const char* name);
  Arrays read(bool with_pointers);

  const TVMFFIAny* next_;
  const TVMFFIAny* end_;
};

}  // namespace fulmen::ffi
