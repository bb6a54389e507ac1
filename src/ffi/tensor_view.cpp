// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// DLPack dtypes, devices and axes in the words of fulmen.h.

#include "ffi/tensor_view.h"

#include <utility>

#include "ffi/refusal.h"

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

fulmen_dtype dtype_of(const char* name, DLDataType dtype, bool reinterpret) {
  const unsigned bits = dtype.lanes == 1 ? dtype.bits : 0u;
  switch (dtype.code) {
    case kDLFloat:
      if (bits == 64) return FULMEN_FLOAT64;
      if (bits == 32) return FULMEN_FLOAT32;
      if (bits == 16) return FULMEN_FLOAT16;
      break;
    case kDLBfloat:
      if (bits == 16) return FULMEN_BFLOAT16;
      break;
    case kDLInt:
      if (bits == 32) return FULMEN_INT32;
      if (bits == 64) return FULMEN_INT64;
      break;
    case kDLBool:
      if (bits == 8) return FULMEN_BOOL;
      break;
    case kDLUInt:
      if (reinterpret && bits == 16) return FULMEN_BFLOAT16;
      if (reinterpret && bits == 8) return FULMEN_BOOL;
      break;
    default:
      break;
  }
  throw Refusal{FULMEN_ERROR_DTYPE,
                std::string(name) + " has dtype " + dtype_text(dtype) +
                    "; fulmen knows float64, float32, float16, bfloat16, bool, int32 and int64"};
}

std::string place_text(int32_t index) {
  return index < 0 ? "in host memory" : "on GPU " + std::to_string(index);
}

}  // namespace

fulmen_tensor view(const char* name, const DLTensor& tensor, ViewOptions options) {
  if (tensor.ndim > FULMEN_MAX_RANK) {
    throw Refusal{FULMEN_ERROR_SHAPE, std::string(name) + " has " + std::to_string(tensor.ndim) +
                                          " axes; at most 4 are allowed"};
  }
  const fulmen_dtype dtype = dtype_of(name, tensor.dtype, options.reinterpret);
  char* data = static_cast<char*>(tensor.data);
  if (data != nullptr) data += tensor.byte_offset;
  fulmen_tensor result;
  check(fulmen_tensor_init(&result, data, dtype, tensor.ndim, tensor.shape));
  if (tensor.strides != nullptr) {
    for (int axis = 0; axis < tensor.ndim; ++axis) result.strides[axis] = tensor.strides[axis];
  }
  if (options.rows_before_heads && tensor.ndim >= 3) {
    std::swap(result.shape[tensor.ndim - 3], result.shape[tensor.ndim - 2]);
    std::swap(result.strides[tensor.ndim - 3], result.strides[tensor.ndim - 2]);
  }
  return result;
}

void Place::add(const char* name, DLDevice device) {
  int32_t index = -1;
  switch (device.device_type) {
    case kDLCPU:
      break;
    case kDLCUDAHost:
      return;
    case kDLCUDA:
    case kDLCUDAManaged:
      index = device.device_id;
      break;
    default:
      throw Refusal{FULMEN_ERROR_UNSUPPORTED,
                    std::string(name) + " is on a device of DLPack type " +
                        std::to_string(device.device_type) +
                        "; fulmen computes in host memory and on NVIDIA GPUs: copy it there first"};
  }
  if (owner_ == nullptr) {
    owner_ = name;
    index_ = index;
  } else if (index != index_) {
    throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is " + place_text(index) + " and " +
                                             owner_ + " " + place_text(index_) +
                                             "; all arrays of a call are in one place: copy " +
                                             name + " there"};
  }
}

}  // namespace fulmen::ffi
