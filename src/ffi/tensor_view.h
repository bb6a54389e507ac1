// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A DLPack view as a fulmen_tensor: same memory, names of dtypes translated, axes in the order that
// fulmen.h names them. Shapes are not judged here: the core does that for every binding alike.
#pragma once

#include <string>

#include "ffi/tvm_ffi_abi.h"
#include "fulmen/fulmen.h"

namespace fulmen::ffi {

// What the Python side knows of an array and DLPack does not.
struct ViewOptions {
  bool rows_before_heads = false;  // axes (..., row, head, dim): the two are exchanged
  bool reinterpret = false;        // uint16 holds bfloat16, uint8 holds bool: NumPy exports neither
};

// Throws Refusal, naming the array: a dtype that fulmen does not know, too many axes.
fulmen_tensor view(const char* name, const DLTensor& tensor, ViewOptions options);

// Where the arrays of one call are. Pinned host memory is reached from both sides: it follows the
// others.
class Place {
 public:
  // Throws Refusal: a device that fulmen does not know, or another one than the arrays before.
  void add(const char* name, DLDevice device);

  bool on_gpu() const { return owner_ != nullptr && index_ >= 0; }
  int32_t index() const { return index_; }  // CUDA's number of the GPU; -1: host memory

 private:
  const char* owner_ = nullptr;  // the first array that is somewhere
  int32_t index_ = -1;
};

}  // namespace fulmen::ffi
