// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A view of a caller's array: data, dtype and up to four axes with 64-bit strides in elements.
// Validation brings every array of a problem to rank 4 (leading axes of extent 1, stride 0), and
// gives an axis that is broadcast the stride 0, so that whoever reads never asks about ranks.
//
// Names and kinds of element types (the types are in base.cuh), and loads and stores through them
// one element at a time. The slow, general way to touch an array: the scalar oracle and every setup
// path use it; tiled kernels convert whole rows themselves.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "fulmen/fulmen.h"
#include "kernels/base.cuh"

namespace fulmen {

enum class DTypeClass : u8 { kNone, kFloat, kBool, kInt, kQuantised };

// By number; 0 is kNone.
inline constexpr const char* kDTypeNames[] = {
    "none",
#define FULMEN_DTYPE(name, code, text, ...) text,
#include "fulmen/enums.def"
};
inline constexpr DTypeClass kDTypeClasses[] = {
    DTypeClass::kNone,
#define FULMEN_DTYPE(name, code, text, bytes, kind, ...) DTypeClass::kind,
#include "fulmen/enums.def"
};

// The table against the type that kernels have.
#define FULMEN_DTYPE(name, code, text, bytes, kind, ...)     \
  static_assert(int{code} == static_cast<int>(DType::name)); \
  static_assert(size_bytes(DType::name) == bytes);           \
  static_assert(is_quantised(DType::name) == (DTypeClass::kind == DTypeClass::kQuantised));
#include "fulmen/enums.def"

constexpr const char* name(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }

// What q may be, and all that is computed with.
constexpr bool is_float(DType dtype) {
  return kDTypeClasses[static_cast<int>(dtype)] == DTypeClass::kFloat;
}

constexpr bool is_index(DType dtype) {
  return kDTypeClasses[static_cast<int>(dtype)] == DTypeClass::kInt;
}

// The type of lse, stats and every sum: float64 for float64, else float32.
constexpr DType accumulator(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Unaligned and free of aliasing rules: arrays come from callers.
template <class T>
T load_bytes(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <class T>
void store_bytes(void* address, T value) {
  std::memcpy(address, &value, sizeof(T));
}

// One floating-point or quantised element, exact.
inline double load_real(const void* address, DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return load_bytes<double>(address);
    case DType::kFloat32:
      return static_cast<double>(load_bytes<float>(address));
    case DType::kFloat16:
      return static_cast<double>(to_float(load_bytes<f16>(address)));
    case DType::kBFloat16:
      return static_cast<double>(to_float(load_bytes<bf16>(address)));
    case DType::kFloat8E4M3:
      return static_cast<double>(to_float(load_bytes<e4m3>(address)));
    case DType::kFloat8E5M2:
      return static_cast<double>(to_float(load_bytes<e5m2>(address)));
    case DType::kInt8:
      return static_cast<double>(to_float(load_bytes<int8>(address)));
    default:
      return 0.0;
  }
}

// The float32 nearest to x from which a second rounding to a 16-bit type gives what one rounding of
// x would have given ("round to odd": an inexact result gets an odd last bit).
inline float narrow_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  const u32 bits = __builtin_bit_cast(u32, nearest);
  if (!(back != x) || x != x || (bits & 0x7f800000u) == 0x7f800000u || (bits & 1u)) return nearest;
  const bool grow = (back < x) == (x > 0);  // towards x, in magnitude
  return __builtin_bit_cast(float, grow ? bits + 1u : bits - 1u);
}

// x in float64 or float32, never below x: a row maximum rounded like this leaves no exponent s - m
// positive. NaN stays NaN.
inline double round_up(double x, DType dtype) {
  if (dtype == DType::kFloat64) return x;
  const float nearest = static_cast<float>(x);
  if (!(static_cast<double>(nearest) < x)) return static_cast<double>(nearest);
  return static_cast<double>(std::nextafter(nearest, std::numeric_limits<float>::infinity()));
}

// One element, rounded to nearest, ties to even; a quantised one to the nearest that there is.
inline void store_real(void* address, DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat64:
      store_bytes(address, value);
      break;
    case DType::kFloat32:
      store_bytes(address, static_cast<float>(value));
      break;
    case DType::kFloat16:
      store_bytes(address, to_f16(narrow_to_odd(value)));
      break;
    case DType::kBFloat16:
      store_bytes(address, to_bf16(narrow_to_odd(value)));
      break;
    case DType::kFloat8E4M3:
      store_bytes(address, to_e4m3(narrow_to_odd(value)));
      break;
    case DType::kFloat8E5M2:
      store_bytes(address, to_e5m2(narrow_to_odd(value)));
      break;
    case DType::kInt8:
      store_bytes(address, to_int8(narrow_to_odd(value)));
      break;
    default:
      break;
  }
}

// One int32 or int64 element.
inline i64 load_index(const void* address, DType dtype) {
  return dtype == DType::kInt64 ? load_bytes<i64>(address)
                                : static_cast<i64>(load_bytes<i32>(address));
}

// Counts in as many bits as a number of the working type has.
template <class Real>
using Count = std::conditional_t<sizeof(Real) == sizeof(u64), u64, u32>;

inline constexpr int kMaxRank = 4;

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kNone;
  int rank = 0;
  i64 shape[kMaxRank] = {};
  i64 strides[kMaxRank] = {};

  bool present() const { return dtype != DType::kNone; }

  // Also of a tensor that was not checked, whose rank may be any number.
  bool empty() const {
    for (int axis = 0; axis < rank && axis < kMaxRank; ++axis) {
      if (shape[axis] == 0) return true;
    }
    return false;
  }

  char* address(i64 a, i64 b, i64 c, i64 d) const {
    const i64 index = a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
    return static_cast<char*>(data) + index * size_bytes(dtype);
  }

  double real(i64 a, i64 b, i64 c, i64 d) const { return load_real(address(a, b, c, d), dtype); }

  void set_real(i64 a, i64 b, i64 c, i64 d, double value) const {
    store_real(address(a, b, c, d), dtype, value);
  }

  bool boolean(i64 a, i64 b, i64 c, i64 d) const {
    return load_bytes<u8>(address(a, b, c, d)) != 0;
  }

  i64 index(i64 a, i64 b, i64 c, i64 d) const { return load_index(address(a, b, c, d), dtype); }
};

}  // namespace fulmen
