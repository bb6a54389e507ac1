// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Those parts of three public C ABIs that the bindings need, in our own declarations: DLPack's
// DLTensor, the calling convention of apache-tvm-ffi, and of XLA's foreign function interface (its
// C ABI, version 0.x) what a handler needs. So the library is built without any of these packages
// and links to none; tests/python/test_abi.py and tests/jax/test_abi.py compare every number here
// with the headers of the installed packages.
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
enum : uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e5m2 = 12,
};

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

struct XlaApi;
struct XlaContext;
struct XlaError;

struct XlaExtension {
  size_t struct_size;
  int32_t type;  // 1: metadata
  XlaExtension* next;
};
inline constexpr int32_t kXlaMetadata = 1;

struct XlaApiVersion {
  size_t struct_size;
  XlaExtension* extension;
  int32_t major;
  int32_t minor;
};

struct XlaMetadata {
  size_t struct_size;
  XlaApiVersion version;
  uint32_t traits;
};

struct XlaMetadataExtension {
  XlaExtension base;
  XlaMetadata* metadata;
};

struct XlaBuffer {
  size_t struct_size;
  XlaExtension* extension;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

// Of a buffer's dtype; those of arrays are in fulmen/enums.def.
inline constexpr int32_t kXlaS64 = 5;
inline constexpr int32_t kXlaU32 = 8;

// Arguments and results alike: `items` are XlaBuffer* where the type is kXlaIsBuffer.
struct XlaBuffers {
  size_t struct_size;
  XlaExtension* extension;
  int64_t size;
  int32_t* types;
  void** items;
};
inline constexpr int32_t kXlaIsBuffer = 1;

struct XlaText {
  const char* data;
  size_t size;
};

struct XlaArray {
  int32_t dtype;
  size_t size;
  void* data;
};

struct XlaAttributes {
  size_t struct_size;
  XlaExtension* extension;
  int64_t size;
  int32_t* types;
  XlaText** names;
  void** items;
};
inline constexpr int32_t kXlaIsArray = 1;

struct XlaCallFrame {
  size_t struct_size;
  XlaExtension* extension;
  const XlaApi* api;
  XlaContext* context;
  int32_t stage;
  XlaBuffers arguments;
  XlaBuffers results;
  XlaAttributes attributes;
};

struct XlaErrorCreate {
  size_t struct_size;
  XlaExtension* extension;
  const char* message;
  int32_t code;
};
inline constexpr int32_t kXlaInvalidArgument = 3;

struct XlaStreamGet {
  size_t struct_size;
  XlaExtension* extension;
  XlaContext* context;
  void* stream;  // out
};

struct XlaDeviceOrdinalGet {
  size_t struct_size;
  XlaExtension* extension;
  XlaContext* context;
  int32_t ordinal;  // out
};

// Functions of XLA, in the order of its struct; those that are not called here are void*.
struct XlaApi {
  size_t struct_size;
  XlaExtension* extension;
  XlaApiVersion version;
  const void* internal;
  XlaError* (*error_create)(XlaErrorCreate*);
  void* unused_before_stream[3];
  XlaError* (*stream_get)(XlaStreamGet*);
  void* unused_before_ordinal[12];
  XlaError* (*device_ordinal_get)(XlaDeviceOrdinalGet*);  // since version 0.3
};

}  // namespace fulmen::ffi
