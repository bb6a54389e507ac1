// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's tensors as a kernel of its dispatcher holds them, and memory for results, by the part
// of PyTorch's stable C ABI that this takes: declared by ourselves and found in the PyTorch that
// the process has loaded. Nothing is linked, no header of PyTorch is needed. Documented there in
// torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h; whole since PyTorch 2.10.
//
// The arguments of a kernel, in the order of its schema: each is read once, and then ours. The
// inputs of a call, which come first in all operators of python/fulmen/_torch/ops.py, and options,
// layout and out_dtype, which follow in most, are read at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/abi.h"
#include "ffi/arrays.h"

namespace fulmen::ffi {

using TorchTensor = struct TorchTensorOpaque*;
using TorchList = struct TorchListOpaque*;
using TorchLibrary = struct TorchLibraryOpaque*;
using TorchValue = uint64_t;  // an argument or result: a number, or a handle, owned by its receiver
using TorchKernel = void (*)(TorchValue* stack, uint64_t num_arguments, uint64_t num_results);

inline constexpr uint64_t kTorchVersion = uint64_t{2} << 56 | uint64_t{10} << 48;

// Where an int32_t is returned, 0 is success.
struct TorchAbi {
  int32_t (*library_init_impl)(const char* name_space, const char* key, const char* file,
                               uint32_t line, TorchLibrary* library);
  int32_t (*library_impl)(TorchLibrary library, const char* name, TorchKernel kernel,
                          uint64_t version);
  int32_t (*call_dispatcher)(const char* name, const char* overload, TorchValue* stack,
                             uint64_t version);
  int32_t (*list_size)(TorchList list, size_t* size);
  int32_t (*list_get_item)(TorchList list, size_t index, TorchValue* item);
  int32_t (*delete_list)(TorchList list);

  int32_t (*get_data_ptr)(TorchTensor tensor, void** data);
  int32_t (*get_dim)(TorchTensor tensor, int64_t* rank);
  int32_t (*get_sizes)(TorchTensor tensor, int64_t** shape);
  int32_t (*get_strides)(TorchTensor tensor, int64_t** strides);
  int32_t (*get_dtype)(TorchTensor tensor, int32_t* dtype);
  int32_t (*get_device_type)(TorchTensor tensor, int32_t* type);
  int32_t (*get_device_index)(TorchTensor tensor, int32_t* index);
  int32_t (*is_defined)(TorchTensor tensor, bool* is_defined);
  int32_t (*new_undefined)(TorchTensor* tensor);
  int32_t (*delete_tensor)(TorchTensor tensor);
  int32_t (*empty_strided)(int64_t rank, const int64_t* shape, const int64_t* strides,
                           int32_t dtype, int32_t device_type, int32_t device_index,
                           TorchTensor* tensor);
  int32_t (*fill_with_zeros)(TorchTensor tensor);
  bool (*is_grad_enabled)();
  int32_t (*get_cuda_stream)(int32_t device_index, void** stream);  // null: PyTorch without CUDA

  int32_t dtypes[kNumDTypes];  // its numbers of those of kDTypes
  int32_t uint8;               // of workspaces
  int32_t cpu, cuda;           // and of kinds of devices
};

// Null where the process has loaded no PyTorch that has all of it.
const TorchAbi* torch_abi();

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
// A vector of bytes on the GPU with that number of CUDA's, or in host memory: -1.
TorchArray empty_bytes(size_t count, int32_t device);

class TorchArguments {
 public:
  explicit TorchArguments(const TorchValue* stack) : next_(stack) {}

  TorchArray array() { return TorchArray(*next_++); }
  TorchArray optional_array() { return TorchArray(optional(0)); }  // none: not given
  TorchValue optional(TorchValue otherwise);                       // what a `?` of the schema holds
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  double real();
  bool flag() { return (*next_++ & 0xff) != 0; }
  std::vector<TorchArray> arrays();
  TorchValue bits(size_t count);  // of a list of flags, the first lowest
  fulmen_problem options();       // of a list of integers: the bytes of a fulmen_problem

 private:
  const TorchValue* next_;
};

// One call of the library: options, arrays, PyTorch's current stream.
class TorchCall {
 public:
  // has_pools: k and v are pools of pages, which have all axes of fulmen.h whatever q has.
  TorchCall(const fulmen_problem& problem, Layout layout, bool has_pools = false)
      : problem_(problem), layout_(layout), kv_rank_(has_pools ? FULMEN_MAX_RANK : layout.rank) {}

  bool rows_before_heads() const { return layout_.rows_before_heads; }

  // Throws Refusal: an array that fulmen does not know, or q, k or v without the layout's axes.
  void add(ArrayIndex index, const DLTensor& array);

  void set_philox(uint64_t seed, uint64_t offset) {
    problem_.rng_seed = seed;
    problem_.rng_offset = offset;
  }

  void run(fulmen_status (*function)(const fulmen_problem*, const fulmen_tensors*, void*));
  // By a plan for the forward pass; without a workspace it comes from PyTorch's allocator.
  void run(const fulmen_plan* plan, const TorchArray& workspace);

 private:
  void* stream() const;

  fulmen_problem problem_;
  Layout layout_;
  int64_t kv_rank_;
  Arrays arrays_;
};

// As a result of a type with `?`; one that is not given is None.
TorchValue optional_result(TorchArray array);

// The options of a call: as words among the arguments, or kept under a number.
struct TorchOptions {
  fulmen_problem problem;
  Layout layout;
  int32_t out_dtype;  // PyTorch's number, or kSameDtype; of no meaning where options are kept

  static TorchOptions read(TorchArguments* in);
  // Throws Refusal: no call was kept under that number (torch_sdpa_node.cpp).
  static const TorchOptions& kept(double number);
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
