// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// DLPack dtypes, devices and axes in the words of fulmen.h.

#include "ffi/arrays.h"

#include <dlfcn.h>

#include <cctype>
#include <cstring>
#include <utility>

namespace fulmen::ffi {
namespace {

std::string dtype_text(DLDataType dtype) {
  const char* kind = "of an unknown kind, ";
  switch (dtype.code) {
    case kDLInt:
      kind = "int";
      break;
    case kDLUInt:
      kind = "uint";
      break;
    case kDLFloat:
      kind = "float";
      break;
    case kDLBfloat:
      kind = "bfloat";
      break;
    case kDLBool:
      kind = "bool";
      break;
    case 5:
      kind = "complex";
      break;
    default:
      break;
  }
  return kind + std::to_string(dtype.bits);
}

fulmen_dtype dtype_of(const char* name, DLDataType dtype, uint8_t number) {
  const int bits = dtype.lanes == 1 ? dtype.bits : 0;
  for (const DTypeRow& row : kDTypes) {
    const bool is_this = number == 0 ? dtype.code == row.dlpack.code : number == row.number;
    if (is_this && bits == row.dlpack.bits) return row.number;
  }
  throw Refusal{FULMEN_ERROR_DTYPE, std::string(name) + " has dtype " + dtype_text(dtype) +
                                        "; fulmen knows " + known_dtypes()};
}

std::string space_text(int32_t index) {
  return index < 0 ? "in host memory" : "on GPU " + std::to_string(index);
}

// Enumerators that are none are left to the library, which names them.
bool is_of_gpu(fulmen_implementation implementation) {
#define FULMEN_IMPLEMENTATION(name, code, text, backend) \
  if (implementation == code) return std::string_view(#backend) == "kCuda";
#include "fulmen/enums.def"
  return false;
}

bool is_of_name(char c) { return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0; }

void replace_name(std::string* text, std::string_view name, std::string_view word) {
  for (size_t at = text->find(name); at != std::string::npos; at = text->find(name, at + 1)) {
    const size_t end = at + name.size();
    if (at > 0 && is_of_name((*text)[at - 1])) continue;
    if (end < text->size() && is_of_name((*text)[end])) continue;
    text->replace(at, name.size(), word);
  }
}

}  // namespace

std::string known_dtypes() {
  std::string all;
#define FULMEN_DTYPE(name, number, text, ...) all += all.empty() ? text : ", " text;
#include "fulmen/enums.def"
  return all;
}

void check_failed(fulmen_status status) {
  std::string sentence = fulmen_last_error();
  for (const ArrayRow& row : kArrays) {
    if (std::string_view(row.word) != row.name) replace_name(&sentence, row.name, row.word);
  }
  throw Refusal{status, sentence};
}

fulmen_quantisation quantisation_of(int64_t rotate, int64_t headroom) {
  fulmen_quantisation quantisation;
  fulmen_quantisation_init(&quantisation);
  quantisation.rotate = static_cast<int32_t>(rotate);
  std::memcpy(&quantisation.headroom, &headroom, sizeof(double));
  return quantisation;
}

void set_array(fulmen_quantisation& quantisation, const QuantiseRow& row,
               const fulmen_tensor& array) {
  if (array.rank == 0 && array.data == nullptr) return;  // absent
  quantisation.*row.member = array;
  if (row.finds != nullptr) quantisation.*row.finds = 1;
}

void check_append_failed(fulmen_status status) {
  std::string sentence = fulmen_last_error();
  for (const AppendRow& row : kAppendRows) {
    if (std::string_view(row.word) != row.name) replace_name(&sentence, row.name, row.word);
  }
  throw Refusal{status, sentence};
}

fulmen_tensor view(const char* name, const DLTensor& tensor, ViewOptions options) {
  if (tensor.ndim > FULMEN_MAX_RANK) {
    throw Refusal{FULMEN_ERROR_SHAPE, std::string(name) + " has " + std::to_string(tensor.ndim) +
                                          " axes; at most 4 are allowed"};
  }
  const fulmen_dtype dtype = dtype_of(name, tensor.dtype, options.dtype);
  char* data = static_cast<char*>(tensor.data);
  if (data != nullptr) data += tensor.byte_offset;
  fulmen_tensor result;
  check(fulmen_tensor_init(&result, data, dtype, tensor.ndim, tensor.shape));
  if (tensor.strides != nullptr) {
    for (int axis = 0; axis < tensor.ndim; ++axis) result.strides[axis] = tensor.strides[axis];
  }
  if (!options.rows_before_heads || tensor.ndim < 2) return result;
  if (tensor.ndim == 2) {  // (head, dim): of any row
    result.rank = 3;
    result.shape[2] = result.shape[1];
    result.strides[2] = result.strides[1];
    result.shape[1] = result.shape[0];
    result.strides[1] = result.strides[0];
    result.shape[0] = 1;
    result.strides[0] = 0;
  }
  std::swap(result.shape[result.rank - 3], result.shape[result.rank - 2]);
  std::swap(result.strides[result.rank - 3], result.strides[result.rank - 2]);
  return result;
}

void MemorySpace::add(const char* name, DLDevice device) {
  int32_t device_id = -1;
  switch (device.device_type) {
    case kDLCPU:
      break;
    case kDLCUDAHost:
      return;
    case kDLCUDA:
    case kDLCUDAManaged:
      device_id = device.device_id;
      break;
    default:
      throw Refusal{FULMEN_ERROR_UNSUPPORTED,
                    std::string(name) + " is on a device of DLPack type " +
                        std::to_string(device.device_type) +
                        "; fulmen computes in host memory and on NVIDIA GPUs: copy it there first"};
  }
  if (owner_ == nullptr) {
    owner_ = name;
    device_ = device_id;
  } else if (device_id != device_) {
    throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is " + space_text(device_id) +
                                             " and " + owner_ + " " + space_text(device_) +
                                             "; all arrays of a call are in one place: copy " +
                                             name + " there"};
  }
}

void Arrays::add(ArrayIndex index, const DLTensor& array, ViewOptions options) {
  const ArrayRow& row = kArrays[index];
  options.rows_before_heads = options.rows_before_heads && row.has_head_and_row;
  fulmen_tensor& tensor = tensors.*row.member;
  tensor = view(row.word, array, options);
  if (row.is_captured && tensor.rank == 0) {  // without a pointer it would count as absent
    tensor.rank = 1;
    tensor.shape[0] = tensor.strides[0] = 1;
  }
  space.add(row.word, array.device);
}

void Arrays::add_extents(ArrayIndex index, const DLTensor& array, ViewOptions options) {
  Arrays anywhere;
  anywhere.add(index, array, options);
  const auto member = kArrays[index].member;
  tensors.*member = anywhere.tensors.*member;
  (tensors.*member).data = nullptr;
}

void Arrays::resolve_device(fulmen_problem* problem) const {
  if (space.on_gpu()) {
    if (problem->device < 0) problem->device = space.device();
    if (problem->backend == FULMEN_BACKEND_AUTO) problem->backend = FULMEN_BACKEND_CUDA;
    return;
  }
  const bool is_gpu_asked =
      problem->backend == FULMEN_BACKEND_CUDA ||
      (problem->backend == FULMEN_BACKEND_AUTO && is_of_gpu(problem->implementation));
  if (is_gpu_asked) {
    throw Refusal{FULMEN_ERROR_ARGUMENT,
                  "the arrays are in host memory and backend or implementation names a GPU; copy "
                  "them to the GPU, or use backend='cpu' with implementation='auto'"};
  }
  if (problem->backend == FULMEN_BACKEND_AUTO &&
      problem->implementation == FULMEN_IMPLEMENTATION_AUTO) {
    problem->backend = FULMEN_BACKEND_CPU;
  }
}

// tvm-ffi has loaded its library for all to see before it calls us: nothing is linked.
void* Arrays::stream(int64_t given) const {
  if (!space.on_gpu()) return nullptr;
  if (given != kCurrentStream) return reinterpret_cast<void*>(static_cast<intptr_t>(given));
  using GetStream = void* (*)(int32_t device_type, int32_t device_id);
  static const auto get_stream =
      reinterpret_cast<GetStream>(dlsym(RTLD_DEFAULT, "TVMFFIEnvGetStream"));
  return get_stream == nullptr ? nullptr : get_stream(kDLCUDA, space.device());
}

fulmen_problem problem_of(const void* bytes, size_t size) {
  fulmen_problem problem;
  if (size != sizeof problem) {
    throw Refusal{FULMEN_ERROR_ARGUMENT, "options has " + std::to_string(size) +
                                             " bytes; this library reads " +
                                             std::to_string(sizeof problem) +
                                             ": it is of another version than the binding"};
  }
  std::memcpy(&problem, bytes, sizeof problem);
  if (problem.device_name != nullptr) {
    throw Refusal{FULMEN_ERROR_ARGUMENT, "options holds a pointer; texts are passed beside it"};
  }
  return problem;
}

}  // namespace fulmen::ffi
