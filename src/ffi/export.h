// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a function that reads Arguments and returns a number to a symbol that tvm-ffi calls.
//
// Reads the arguments of one call from Python, in order; python/fulmen/_library.py writes them.
//
//   options   bytes: those of a fulmen_problem, device_name null
//   texts     str or None: for each option that is a text (device_name)
//   experiment  without (int), tile (str or None)
//   stream    int: a CUstream as its address; kCurrentStream: the one that the caller's framework
//             has told tvm-ffi (PyTorch does, by the tensors of the call). Ignored on the CPU
//   arrays    dtypes (0, or bytes: ViewOptions::dtype of each array), layout (int, see Layout),
//   then
//             the arrays of fulmen/arrays.def in its order; None is absent, and so is all beyond
//             the last one
#pragma once

#include <optional>
#include <string>

#include "ffi/abi.h"
#include "ffi/arrays.h"
#include "fulmen/fulmen.h"
#include "fulmen/fulmen_experimental.h"

namespace fulmen::ffi {

// A caller's buffer of bytes: workspace, or room for a text.
struct Bytes {
  char* data = nullptr;
  size_t size = 0;
};

// The workspace of a run over arrays in `arrays`; null: none. Throws Refusal: it is no vector of
// bytes, or elsewhere.
Bytes workspace_of(const DLTensor* vector, const MemorySpace& arrays);

// A plan that is to be made: options with their texts, and an experiment.
struct Planned {
  fulmen_problem problem;
  std::string device_name;
  uint32_t without = 0;
  std::string tile;
};

// What ViewOptions::dtype is of one array after the other.
class OwnDTypes {
 public:
  explicit OwnDTypes(TVMFFIByteArray numbers) : numbers_(numbers) {}

  uint8_t next() {
    if (at_ >= numbers_.size) return 0;
    return static_cast<uint8_t>(numbers_.data[at_++]);
  }

 private:
  TVMFFIByteArray numbers_;
  size_t at_ = 0;
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

  Bytes host_bytes(const char* name);  // a vector of bytes that the host reads or writes
  OwnDTypes own_dtypes();
  std::string text(const char* name);  // str, bytes, a vector of bytes of the host, or None: ""
  std::optional<std::string> optional_text(const char* name);  // likewise; None: none
  fulmen_problem options();
  Planned planned();
  Arrays arrays();
  Arrays extents();  // the same, where only extents, strides and dtypes matter: no pointers

 private:
  const TVMFFIAny& take(const char* name);
  TVMFFIByteArray content(const char* name);  // of str or bytes; null data: None
  Arrays read(bool with_pointers);

  const TVMFFIAny* next_;
  const TVMFFIAny* end_;
};

using Body = int64_t (*)(Arguments);

// Runs a body; an error, of the library or any other, is raised in Python. 0, or -1 after an error.
int guarded(Body body, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result);

}  // namespace fulmen::ffi

#define FULMEN_FFI_EXPORT(verb)                                                                \
  extern "C" FULMEN_API int __tvm_ffi_fulmen_##verb(void*, const fulmen::ffi::TVMFFIAny* args, \
                                                    int32_t num_args,                          \
                                                    fulmen::ffi::TVMFFIAny* result) {          \
    return fulmen::ffi::guarded(fulmen::ffi::verb, args, num_args, result);                    \
  }
