// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A view of a caller's array: data, dtype and up to four axes with 64-bit strides in elements.
// Validation brings every array of a problem to rank 4 (leading axes of extent 1, stride 0), and
// gives an axis that is broadcast the stride 0, so that whoever reads never asks about ranks.
#pragma once

#include "core/dtype.h"

namespace fulmen {

inline constexpr int kMaxRank = 4;

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kNone;
  int rank = 0;
  i64 shape[kMaxRank] = {};
  i64 strides[kMaxRank] = {};

  bool present() const { return dtype != DType::kNone; }

  i64 num_elements() const {
    i64 count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
    return count;
  }

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
