// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Finds PyTorch's stable C ABI in the libraries that the process has loaded, once.
// Between PyTorch's handles and DLPack's words, and from PyTorch's stack to the words of fulmen.h.

#include "ffi/torch_abi.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>

#include "ffi/arrays.h"
#include "ffi/export.h"

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
  torch.ask(&abi.uint8, "aoti_torch_dtype_uint8");
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

namespace {

using Axes = std::array<int64_t, FULMEN_MAX_RANK>;

DLDataType dlpack_dtype(int32_t dtype) {
  const TorchAbi& torch = *torch_abi();
  for (size_t i = 0; i < kNumDTypes; ++i) {
    if (torch.dtypes[i] == dtype) return kDTypes[i].dlpack;
  }
  if (dtype == torch.uint8) return {kDLUInt, 8, 1};
  throw Refusal{FULMEN_ERROR_DTYPE, "a tensor is of none of " + known_dtypes()};
}

// PyTorch's number of a dtype that came from there.
int32_t torch_dtype(DLDataType dtype) {
  const TorchAbi& torch = *torch_abi();
  size_t i = 0;
  while (kDTypes[i].dlpack.code != dtype.code || kDTypes[i].dlpack.bits != dtype.bits) ++i;
  return torch.dtypes[i];
}

DLDevice dlpack_device(TorchTensor tensor) {
  const TorchAbi& torch = *torch_abi();
  int32_t type = 0, index = 0;
  torch.get_device_type(tensor, &type);
  torch.get_device_index(tensor, &index);
  if (type == torch.cuda) return {kDLCUDA, index};
  if (type == torch.cpu) return {kDLCPU, 0};
  throw Refusal{FULMEN_ERROR_ARGUMENT, "a tensor is neither in host memory nor on an NVIDIA GPU"};
}

// Axes from the fastest to the slowest.
using Order = std::array<size_t, FULMEN_MAX_RANK>;

struct Extents {
  Axes shape = {};
  Order order = {};
  size_t rank = 0;

  // The first `count` of x, in the order of a C array.
  Extents(const DLTensor& x, size_t count) : rank(count) {
    if (x.ndim > FULMEN_MAX_RANK) {
      throw Refusal{FULMEN_ERROR_SHAPE, "a tensor has more than 4 axes"};
    }
    std::copy_n(x.shape, count, shape.begin());
    for (size_t i = 0; i < count; ++i) order[i] = count - 1 - i;
  }
};

// Whether a goes behind b when torch.empty_like orders axes, fastest first; it leaves where they
// are those that a broadcast has made.
bool goes_behind(const DLTensor& x, size_t a, size_t b) {
  if (x.strides[a] != x.strides[b]) return x.strides[a] > x.strides[b];
  return x.shape[a] > x.shape[b];
}

void order_as_torch(const DLTensor& x, Extents* made) {
  Order& order = made->order;
  for (size_t i = 1; i < made->rank; ++i) {
    size_t at = i;
    for (size_t other = i; other-- > 0;) {
      const size_t a = order[other], b = order[at];
      if (x.strides[a] == 0 || x.strides[b] == 0) continue;
      if (goes_behind(x, a, b)) {
        std::swap(order[other], order[at]);
        at = other;
      } else if (x.strides[a] < x.strides[b]) {
        break;
      }
    }
  }
}

TorchArray empty(const Extents& made, int32_t dtype, DLDevice device) {
  const TorchAbi& torch = *torch_abi();
  const bool on_gpu = device.device_type == kDLCUDA;
  Axes strides = {};
  int64_t stride = 1;
  for (size_t i = 0; i < made.rank; ++i) {
    strides[made.order[i]] = stride;
    stride *= std::max<int64_t>(made.shape[made.order[i]], 1);
  }
  TorchTensor result = nullptr;
  if (torch.empty_strided(static_cast<int64_t>(made.rank), made.shape.data(), strides.data(), dtype,
                          on_gpu ? torch.cuda : torch.cpu, on_gpu ? device.device_id : -1,
                          &result) != 0) {
    throw Refusal{FULMEN_ERROR_OUT_OF_MEMORY,
                  std::string(on_gpu ? "CUDA" : "host") +
                      " out of memory. PyTorch has none for a result of fulmen.attention"};
  }
  return TorchArray(result);
}

}  // namespace

TorchArray::~TorchArray() {
  if (owned_ != nullptr) torch_abi()->delete_tensor(owned_);
}

bool TorchArray::is_defined() const {
  bool defined = false;
  torch_abi()->is_defined(owned_, &defined);
  return defined;
}

DLTensor TorchArray::dlpack() const {
  const TorchAbi& torch = *torch_abi();
  DLTensor found = {};
  int64_t rank = 0;
  int32_t dtype = 0;
  torch.get_dtype(owned_, &dtype);
  found.dtype = dlpack_dtype(dtype);
  torch.get_dim(owned_, &rank);
  found.ndim = static_cast<int32_t>(rank);
  torch.get_sizes(owned_, &found.shape);
  torch.get_strides(owned_, &found.strides);
  torch.get_data_ptr(owned_, &found.data);
  found.device = dlpack_device(owned_);
  return found;
}

TorchValue TorchArray::released() {
  return reinterpret_cast<TorchValue>(std::exchange(owned_, nullptr));
}

TorchArray undefined() {
  TorchTensor made = nullptr;
  torch_abi()->new_undefined(&made);
  return TorchArray(made);
}

TorchArray empty_like(const DLTensor& x, int64_t last_extent, int32_t dtype) {
  Extents made(x, static_cast<size_t>(x.ndim));
  if (made.rank > 0) {
    const size_t last = made.rank - 1;
    made.shape[last] = last_extent;
    if (x.strides[last] == 1 && x.shape[last] == last_extent) {
      order_as_torch(x, &made);
    } else if (x.strides[last] == 1) {
      std::stable_sort(made.order.begin() + 1, made.order.begin() + made.rank,
                       [&](size_t a, size_t b) {
                         return x.strides[a] != x.strides[b] ? x.strides[a] < x.strides[b] : a > b;
                       });
    }
  }
  return empty(made, dtype == kSameDtype ? torch_dtype(x.dtype) : dtype, x.device);
}

TorchArray empty_sums(const DLTensor& q, bool rows_before_heads, Sums kind) {
  const auto axes = static_cast<size_t>(q.ndim);
  Extents made(q, kind == Sums::kStats ? axes : axes - 1);
  if (rows_before_heads && axes >= 3) std::swap(made.shape[axes - 3], made.shape[axes - 2]);
  if (kind == Sums::kStats) made.shape[axes - 1] = 2;
  const uint8_t bits = q.dtype.bits == 64 ? 64 : 32;
  return empty(made, torch_dtype({kDLFloat, bits, 1}), q.device);
}

TorchArray zero_beside(const DLTensor& x) {
  TorchArray made = empty(Extents(x, 0), torch_dtype(x.dtype), x.device);
  torch_abi()->fill_with_zeros(made.owned_);
  return made;
}

TorchArray empty_bytes(size_t count, int32_t device) {
  auto extent = static_cast<int64_t>(count);
  DLTensor vector = {};
  vector.ndim = 1;
  vector.shape = &extent;
  const DLDevice where = device < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, device};
  return empty(Extents(vector, 1), torch_abi()->uint8, where);
}

TorchValue TorchArguments::optional(TorchValue otherwise) {
  const auto* held = reinterpret_cast<const TorchValue*>(*next_++);
  if (held == nullptr) return otherwise;
  const TorchValue value = *held;
  delete held;
  return value;
}

double TorchArguments::real() { return std::bit_cast<double>(*next_++); }

TorchValue TorchArguments::bits(size_t count) {
  const auto list = reinterpret_cast<TorchList>(*next_++);
  TorchValue result = 0;
  for (size_t i = 0; i < count; ++i) {
    TorchValue wanted = 0;
    torch_abi()->list_get_item(list, i, &wanted);
    result |= TorchValue{wanted != 0} << i;
  }
  torch_abi()->delete_list(list);
  return result;
}

std::vector<TorchArray> TorchArguments::arrays() {
  const auto list = reinterpret_cast<TorchList>(*next_++);
  size_t size = 0;
  torch_abi()->list_size(list, &size);
  std::vector<TorchArray> found;
  for (size_t i = 0; i < size; ++i) {
    TorchValue item = 0;
    torch_abi()->list_get_item(list, i, &item);
    found.emplace_back(item);
  }
  torch_abi()->delete_list(list);
  return found;
}

TorchValue optional_result(TorchArray array) {
  if (!array.is_given()) return 0;
  return reinterpret_cast<TorchValue>(new TorchValue(array.released()));
}

void TorchCall::add(ArrayIndex index, const DLTensor& array) {
  const int64_t rank = index == kQ ? layout_.rank : kv_rank_;
  if (index <= kV && array.ndim != rank) {
    throw Refusal{FULMEN_ERROR_SHAPE,
                  std::string(kArrays[index].word) + " has " + std::to_string(array.ndim) +
                      " axes; the layout of the call names " + std::to_string(rank)};
  }
  arrays_.add(index, array, {layout_.rows_before_heads, 0});
}

void* TorchCall::stream() const {
  void* found = nullptr;
  if (arrays_.space.on_gpu()) torch_abi()->get_cuda_stream(arrays_.space.device(), &found);
  return found;
}

void TorchCall::run(fulmen_status (*function)(const fulmen_problem*, const fulmen_tensors*,
                                              void*)) {
  arrays_.resolve_device(&problem_);
  check(function(&problem_, &arrays_.tensors, stream()));
}

void TorchCall::run(const fulmen_plan* plan, const TorchArray& given) {
  const MemorySpace& space = arrays_.space;
  const size_t needed = given.is_given() ? 0 : fulmen_plan_workspace_bytes(plan);
  const TorchArray made = needed == 0 ? TorchArray() : empty_bytes(needed, space.device());
  const TorchArray& memory = given.is_given() ? given : made;
  const DLTensor vector = memory.is_given() ? memory.dlpack() : DLTensor{};
  const Bytes workspace = workspace_of(memory.is_given() ? &vector : nullptr, space);
  check(fulmen_forward(plan, &arrays_.tensors, workspace.data, workspace.size, stream()));
}

fulmen_problem TorchArguments::options() {
  constexpr size_t kWords = sizeof(fulmen_problem) / sizeof(int64_t);
  const auto list = reinterpret_cast<TorchList>(*next_++);
  TorchValue words[kWords] = {};
  size_t size = 0;
  torch_abi()->list_size(list, &size);
  for (size_t i = 0; i < kWords && i < size; ++i) torch_abi()->list_get_item(list, i, &words[i]);
  torch_abi()->delete_list(list);
  return problem_of(words, size * sizeof(int64_t));
}

TorchOptions TorchOptions::read(TorchArguments* in) {
  TorchOptions found = {};
  found.problem = in->options();
  found.layout = Layout::of(in->integer());
  found.out_dtype = static_cast<int32_t>(in->optional(static_cast<TorchValue>(kSameDtype)));
  return found;
}

}  // namespace fulmen::ffi
