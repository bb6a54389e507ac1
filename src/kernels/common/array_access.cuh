// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Elements of arrays, one at a time: any dtype, any stride, any alignment. GPUs fault on addresses
// that are no multiple of the element's size, so those go byte by byte.
#pragma once

#include "kernels/params.h"

namespace fulmen {

template <class T>
struct Bytes {
  u8 byte[sizeof(T)];
};

template <class T>
bool is_aligned(const u8* address) {
  return reinterpret_cast<u64>(address) % sizeof(T) == 0;
}

template <class T>
T load_element(const u8* address) {
  if (is_aligned<T>(address)) return *reinterpret_cast<const T*>(address);
  Bytes<T> bytes;
  for (u32 i = 0; i < sizeof(T); ++i) bytes.byte[i] = address[i];
  return __builtin_bit_cast(T, bytes);
}

template <class T>
void store_element(u8* address, T value) {
  if (is_aligned<T>(address)) {
    *reinterpret_cast<T*>(address) = value;
    return;
  }
  const Bytes<T> bytes = __builtin_bit_cast(Bytes<T>, value);
  for (u32 i = 0; i < sizeof(T); ++i) address[i] = bytes.byte[i];
}

// The C++ type of an element, and the type in which a kernel computes with it.
template <DType kDType>
struct ElementOf {
  using Type = float;
  using Real = float;
};
template <>
struct ElementOf<DType::kFloat64> {
  using Type = double;
  using Real = double;
};
template <>
struct ElementOf<DType::kFloat16> {
  using Type = f16;
  using Real = float;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using Type = bf16;
  using Real = float;
};

template <>
struct ElementOf<DType::kFloat8E4M3> {
  using Type = e4m3;
  using Real = float;
};
template <>
struct ElementOf<DType::kFloat8E5M2> {
  using Type = e5m2;
  using Real = float;
};
template <>
struct ElementOf<DType::kInt8> {
  using Type = int8;
  using Real = float;
};

template <>
struct ElementOf<DType::kUint8> {  // the numbers of a record that have scales
  using Type = e4m3;
  using Real = float;
};

// From elements to the type that is computed with.
inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(f16 x) { return to_float(x); }
inline float widen(bf16 x) { return to_float(x); }
inline float widen(e4m3 x) { return to_float(x); }
inline float widen(e5m2 x) { return to_float(x); }
inline float widen(int8 x) { return to_float(x); }

// And back, rounded.
inline double narrow(double x, double) { return x; }
inline float narrow(float x, float) { return x; }
inline f16 narrow(float x, f16) { return to_f16(x); }
inline bf16 narrow(float x, bf16) { return to_bf16(x); }
inline e4m3 narrow(float x, e4m3) { return to_e4m3(x); }
inline e5m2 narrow(float x, e5m2) { return to_e5m2(x); }
inline int8 narrow(float x, int8) { return to_int8(x); }

// dtype known at run time only.
template <class Real>
Real load_real(const ArrayView& array, i64 offset) {
  const u8* const address = array.data + offset * size_bytes(array.dtype);
  switch (array.dtype) {
    case DType::kFloat64:
      return static_cast<Real>(load_element<double>(address));
    case DType::kFloat32:
      return static_cast<Real>(load_element<float>(address));
    case DType::kFloat16:
      return static_cast<Real>(widen(load_element<f16>(address)));
    case DType::kBFloat16:
      return static_cast<Real>(widen(load_element<bf16>(address)));
    default:
      return Real(0);
  }
}

template <class Real>
void store_real(const ArrayView& array, i64 offset, Real value) {
  u8* const address = array.data + offset * size_bytes(array.dtype);
  switch (array.dtype) {
    case DType::kFloat64:
      return store_element(address, static_cast<double>(value));
    case DType::kFloat32:
      return store_element(address, static_cast<float>(value));
    case DType::kFloat16:
      return store_element(address, to_f16(static_cast<float>(value)));
    case DType::kBFloat16:
      return store_element(address, to_bf16(static_cast<float>(value)));
    default:
      return;
  }
}

// The same as calls: where the text of all dtypes would otherwise stand several times.
template <class Real>
__attribute__((noinline)) Real load_real_called(const ArrayView& array, i64 offset) {
  return load_real<Real>(array, offset);
}
template <class Real>
__attribute__((noinline)) void store_real_called(const ArrayView& array, i64 offset, Real value) {
  store_real(array, offset, value);
}

inline __attribute__((noinline)) i64 load_index(const ArrayView& array, i64 offset) {
  const u8* const address = array.data + offset * size_bytes(array.dtype);
  return array.dtype == DType::kInt64 ? load_element<i64>(address)
                                      : static_cast<i64>(load_element<i32>(address));
}

// The same of an array whose elements lie on multiples of their size.
inline i64 load_aligned_index(const ArrayView& array, i64 offset) {
  if (array.dtype == DType::kInt64) return reinterpret_cast<const i64*>(array.data)[offset];
  return reinterpret_cast<const i32*>(array.data)[offset];
}

// How those read an index that are told: as a call; or inline, where arrays are aligned.
struct AnyIndex {
  static i64 load(const ArrayView& array, i64 offset) { return load_index(array, offset); }
};
struct AlignedIndex {
  static i64 load(const ArrayView& array, i64 offset) { return load_aligned_index(array, offset); }
};
template <bool kAligned>
struct IndexLoads : AnyIndex {};
template <>
struct IndexLoads<true> : AlignedIndex {};

}  // namespace fulmen
