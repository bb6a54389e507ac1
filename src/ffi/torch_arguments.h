// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arguments of a kernel of PyTorch's dispatcher, in the order of its schema: each is read once,
// and then ours. Those that the operators of python/fulmen/_torch/ops.py share are read at
// once: the inputs, options, layout, out_dtype.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/arrays.h"
#include "ffi/torch_array.h"

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
  TorchValue bits(size_t count);  // of a list of flags, the first lowest
  fulmen_problem options();       // of a list of integers: the bytes of a fulmen_problem

 private:
  const TorchValue* next_;
};

// One call of the library: options, arrays, PyTorch's current stream.
class TorchCall {
 public:
  TorchCall(const fulmen_problem& problem, Layout layout) : problem_(problem), layout_(layout) {}

  bool rows_before_heads() const { return layout_.rows_before_heads; }

  // Throws Refusal: an array that fulmen does not know, or q, k or v without the layout's axes.
  void add(ArrayIndex index, const DLTensor& array);

  void set_philox(uint64_t seed, uint64_t offset) {
    problem_.rng_seed = seed;
    problem_.rng_offset = offset;
  }

  void run(fulmen_status (*function)(const fulmen_problem*, const fulmen_tensors*, void*));

 private:
  fulmen_problem problem_;
  Layout layout_;
  Arrays arrays_;
};

// As a result of a type with `?`; one that is not given is None.
TorchValue optional_result(TorchArray array);

// Arrays, options, layout and out_dtype as the operators have them.
class TorchOperands {
 public:
  explicit TorchOperands(TorchArguments* in);

  const TorchArray& operator[](ArrayIndex index) const { return arrays_[index]; }
  // Throws Refusal: an array that is not allowed.
  TorchCall call() const;
  int32_t out_dtype() const { return out_dtype_; }  // PyTorch's number, or kSameDtype

 private:
  void add_rng(TorchCall* call) const;

  std::vector<TorchArray> arrays_;
  fulmen_problem options_;
  Layout layout_;
  int32_t out_dtype_;
};

// How a kernel of PyTorch's dispatcher says no: by an exception that PyTorch turns into Python's
// RuntimeError. Its status is kept, so that a caller in Python can raise the class that fits.
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
