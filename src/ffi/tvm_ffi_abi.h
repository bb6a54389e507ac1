// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of two public C ABIs that the Python binding needs, in our own declarations: DLPack's
// DLTensor and the calling convention of apache-tvm-ffi. So the library is built without either
// package and links to neither; tests/python/test_abi.py compares every number here with the
// headers of the installed package.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fulmen::ffi {

// DLPack: where an array is, what it holds, its extents and its strides in elements.
struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

enum : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };
enum : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };

// tvm-ffi: every argument and every result is one of these.
enum : int32_t {
  kTVMFFINone = 0,
  kTVMFFIInt = 1,
  kTVMFFIBool = 2,
  kTVMFFIFloat = 3,
  kTVMFFIDLTensorPtr = 7,
  kTVMFFIRawStr = 8,
  kTVMFFIByteArrayPtr = 9,
  kTVMFFISmallStr = 11,
  kTVMFFISmallBytes = 12,
  kTVMFFIStr = 65,
  kTVMFFIBytes = 66,
  kTVMFFITensor = 70
};

struct TVMFFIAny {
  int32_t type_index;
  uint32_t small_size;  // of a small string or bytes, which are in the number; else 0
  union {
    int64_t v_int64;
    double v_float64;
    void* v_ptr;
  };
};

struct TVMFFIByteArray {
  const char* data;
  size_t size;
};

// A tensor object (kTVMFFITensor) is this header with a DLTensor after it.
inline constexpr size_t kTVMFFIObjectBytes = 24;

static_assert(sizeof(TVMFFIAny) == 16);
static_assert(sizeof(DLTensor) == 48);

}  // namespace fulmen::ffi
