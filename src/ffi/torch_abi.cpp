// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Finds PyTorch's stable C ABI in the libraries that the process has loaded, once.

#include "ffi/torch_abi.h"

#include <dlfcn.h>

namespace fulmen::ffi {
namespace {

class Finder {
 public:
  explicit Finder(const char* library) : library_(dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {}

  template <typename Function>
  void find(Function* function, const char* name) {
    if (library_ != nullptr) *function = reinterpret_cast<Function>(dlsym(library_, name));
    has_all_ = has_all_ && *function != nullptr;
  }

  // A number that PyTorch gives by a function of its own.
  void ask(int32_t* number, const char* name) {
    int32_t (*get)() = nullptr;
    find(&get, name);
    if (get != nullptr) *number = get();
  }

  bool has_all() const { return has_all_; }

 private:
  void* library_;
  bool has_all_ = true;
};

const TorchAbi* found() {
  static TorchAbi abi = {};
  Finder torch("libtorch_cpu.so");
  torch.find(&abi.library_init_impl, "aoti_torch_library_init_impl");
  torch.find(&abi.library_impl, "torch_library_impl");
  torch.find(&abi.call_dispatcher, "torch_call_dispatcher");
  torch.find(&abi.list_size, "torch_list_size");
  torch.find(&abi.list_get_item, "torch_list_get_item");
  torch.find(&abi.delete_list, "torch_delete_list");
  torch.find(&abi.get_data_ptr, "aoti_torch_get_data_ptr");
  torch.find(&abi.get_dim, "aoti_torch_get_dim");
  torch.find(&abi.get_sizes, "aoti_torch_get_sizes");
  torch.find(&abi.get_strides, "aoti_torch_get_strides");
  torch.find(&abi.get_dtype, "aoti_torch_get_dtype");
  torch.find(&abi.get_device_type, "aoti_torch_get_device_type");
  torch.find(&abi.get_device_index, "aoti_torch_get_device_index");
  torch.find(&abi.is_defined, "aoti_torch_is_defined");
  torch.find(&abi.new_undefined, "aoti_torch_new_uninitialized_tensor");
  torch.find(&abi.delete_tensor, "aoti_torch_delete_tensor_object");
  torch.find(&abi.empty_strided, "aoti_torch_empty_strided");
  torch.find(&abi.fill_with_zeros, "aoti_torch_zero_");
  torch.find(&abi.is_grad_enabled, "aoti_torch_grad_mode_is_enabled");
  int32_t* dtype = abi.dtypes;
#define FULMEN_DTYPE(name, number, text, ...) torch.ask(dtype++, "aoti_torch_dtype_" text);
#include "fulmen/enums.def"
  torch.ask(&abi.cpu, "aoti_torch_device_type_cpu");
  torch.ask(&abi.cuda, "aoti_torch_device_type_cuda");
  Finder("libtorch_cuda.so").find(&abi.get_cuda_stream, "aoti_torch_get_current_cuda_stream");
  return torch.has_all() ? &abi : nullptr;
}

}  // namespace

const TorchAbi* torch_abi() {
  static const TorchAbi* const abi = found();
  return abi;
}

}  // namespace fulmen::ffi
