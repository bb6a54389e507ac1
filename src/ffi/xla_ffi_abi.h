// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of XLA's foreign function interface (its C ABI, version 0.x) that a handler needs, in
// our own declarations: so the library is built without jaxlib and links to nothing of it.
// tests/jax/test_abi.py compares every offset here with the header that jaxlib ships.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fulmen::ffi {

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
